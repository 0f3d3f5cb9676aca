/* The shallow-water equations on a staggered grid with periodic edges, in the manner of SPEC OMP's swim (own code, from
 * Sadourny's scheme, J. Atmos. Sci. 32, 1975): three loops over all points in each time step, each of them shared out to the
 * threads. To count how a guest's scheduler moves its threads (scripts/guest-threads.py).
 *
 *     gcc -O2 -fopenmp swim.c -o swim && ./swim N STEPS
 */
#include <stdio.h>
#include <stdlib.h>

static long n;

#define AT(i, j) ((i) * n + (j))
#define LOOP _Pragma("omp parallel for schedule(static)") for (long i = 0; i < n; i++)
#define NEIGHBOURS(j)                                                                        \
    long in = (i + 1) % n, ip = (i + n - 1) % n, jn = (j + 1) % n, jp = (j + n - 1) % n; \
    (void)in, (void)ip, (void)jn, (void)jp

static double *grid(void) {
    double *made = malloc(sizeof(double) * n * n);
    if (!made) {
        fprintf(stderr, "no memory for a grid of %ld\n", n);
        exit(1);
    }
    return made;
}

int main(int argc, char **argv) {
    n = argc > 1 ? atol(argv[1]) : 1000;
    long steps = argc > 2 ? atol(argv[2]) : 100;
    double *u = grid(), *v = grid(), *p = grid(), *un = grid(), *vn = grid(), *pn = grid();
    double *uo = grid(), *vo = grid(), *po = grid();
    double *cu = grid(), *cv = grid(), *z = grid(), *h = grid();
    /* Each thread touches its rows first. */
    LOOP for (long j = 0; j < n; j++) {
        long k = AT(i, j);
        u[k] = uo[k] = un[k] = (double)(i * 7 % 11 - 5) * 0.1;
        v[k] = vo[k] = vn[k] = (double)(j * 5 % 13 - 6) * 0.1;
        p[k] = po[k] = pn[k] = 50000.0 + (double)((i + j) % 17);
        cu[k] = cv[k] = z[k] = h[k] = 0.0;
    }
    const double dx = 1e5, dt = 1.0, weight = 0.001;
    for (long step = 0; step < steps; step++) {
        LOOP for (long j = 0; j < n; j++) {
            NEIGHBOURS(j);
            cu[AT(i, j)] = 0.5 * (p[AT(i, j)] + p[AT(ip, j)]) * u[AT(i, j)];
            cv[AT(i, j)] = 0.5 * (p[AT(i, j)] + p[AT(i, jp)]) * v[AT(i, j)];
            z[AT(i, j)] = (v[AT(i, j)] - v[AT(ip, j)] - u[AT(i, j)] + u[AT(i, jp)]) / dx
                / (p[AT(ip, jp)] + p[AT(i, jp)] + p[AT(i, j)] + p[AT(ip, j)]);
            h[AT(i, j)] = p[AT(i, j)] + 0.25 * (u[AT(in, j)] * u[AT(in, j)] + u[AT(i, j)] * u[AT(i, j)]
                + v[AT(i, jn)] * v[AT(i, jn)] + v[AT(i, j)] * v[AT(i, j)]);
        }
        LOOP for (long j = 0; j < n; j++) {
            NEIGHBOURS(j);
            un[AT(i, j)] = uo[AT(i, j)] + dt * ((z[AT(i, jn)] + z[AT(i, j)]) * (cv[AT(i, jn)] + cv[AT(i, j)]) / 8
                - (h[AT(i, j)] - h[AT(ip, j)]) / dx);
            vn[AT(i, j)] = vo[AT(i, j)] - dt * ((z[AT(in, j)] + z[AT(i, j)]) * (cu[AT(in, j)] + cu[AT(i, j)]) / 8
                + (h[AT(i, j)] - h[AT(i, jp)]) / dx);
            pn[AT(i, j)] = po[AT(i, j)] - dt * (cu[AT(in, j)] - cu[AT(i, j)] + cv[AT(i, jn)] - cv[AT(i, j)]) / dx;
        }
        LOOP for (long j = 0; j < n; j++) {
            long k = AT(i, j);
            uo[k] = u[k] + weight * (un[k] - 2 * u[k] + uo[k]);
            vo[k] = v[k] + weight * (vn[k] - 2 * v[k] + vo[k]);
            po[k] = p[k] + weight * (pn[k] - 2 * p[k] + po[k]);
            u[k] = un[k];
            v[k] = vn[k];
            p[k] = pn[k];
        }
    }
    printf("%g %g %g\n", u[n + 1], v[n + 1], p[n + 1]);
    return 0;
}
