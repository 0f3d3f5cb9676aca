/* Five kernels of the NAS Parallel Benchmarks, to be profiled: npb cg|ep|ft|is|mg CLASS ITERATIONS, with OpenMP.
 *
 * Own code from the specification (Bailey and others, "The NAS Parallel Benchmarks", RNR-94-007, recalled), not NASA's:
 * arrays, sizes, loops and what each touches in which order are those of the specification; CG's matrix has its pattern,
 * not its values, and results are not verified against its tables. Classes S, W, A, B (CG also C). At the start of the timed part a
 * system call that does not exist tells the plugin of 'homenode profile' to count anew.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <omp.h>

#define BEGIN 0x686f6d65
#define OR_DIE(p) do { if (!(p)) { fprintf(stderr, "npb: no memory\n"); exit(1); } } while (0)

static void *room(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    OR_DIE(p);
    memset(p, 0, bytes);
    return p;
}

/* ---- The pseudo-random numbers of the specification: x' = 5^13 x mod 2^46, in doubles as it is given there. ---- */

static const double R23 = 0x1p-23, T23 = 0x1p23, R46 = 0x1p-46, T46 = 0x1p46, A13 = 1220703125.0;

static double next_random(double *x, double a) {
    double a1 = (double)(int64_t)(R23 * a), a2 = a - T23 * a1;
    double x1 = (double)(int64_t)(R23 * *x), x2 = *x - T23 * x1;
    double t1 = a1 * x2 + a2 * x1;
    double z = t1 - T23 * (double)(int64_t)(R23 * t1);
    double t3 = T23 * z + a2 * x2;
    *x = t3 - T46 * (double)(int64_t)(R46 * t3);
    return R46 * *x;
}

static void many_random(int n, double *x, double a, double *to) {
    for (int i = 0; i < n; i++) to[i] = next_random(x, a);
}

/* The seed after so many numbers. */
static double seed_after(double seed, double a, int64_t count) {
    double power = a;
    for (; count > 0; count >>= 1) {
        if (count & 1) next_random(&seed, power);
        next_random(&power, power);
    }
    return seed;
}

/* ---- EP ---- */

static void ep(char class, int batches) {
    (void)class; /* classes differ in the number of batches alone */
    enum { PAIRS = 1 << 16 };
    double q[10] = {0}, sx = 0, sy = 0;
    syscall(BEGIN);
#pragma omp parallel reduction(+ : sx, sy, q[:10])
    {
        double *x = room(2 * PAIRS * sizeof *x);
#pragma omp for
        for (int batch = 0; batch < batches; batch++) {
            double seed = seed_after(271828183.0, A13, 2LL * PAIRS * batch);
            many_random(2 * PAIRS, &seed, A13, x);
            for (int i = 0; i < PAIRS; i++) {
                double x1 = 2.0 * x[2 * i] - 1.0, x2 = 2.0 * x[2 * i + 1] - 1.0;
                double t1 = x1 * x1 + x2 * x2;
                if (t1 <= 1.0) {
                    double t2 = sqrt(-2.0 * log(t1) / t1), t3 = x1 * t2, t4 = x2 * t2;
                    q[(int)fmax(fabs(t3), fabs(t4))] += 1.0;
                    sx += t3;
                    sy += t4;
                }
            }
        }
        free(x);
    }
    printf("ep %g %g %g\n", sx, sy, q[0]);
}

/* ---- CG ---- */

struct matrix { int rows; int64_t *start; int *column; double *value; };

/* The pattern of the sum of outer products of random sparse vectors, as the specification builds it: each vector's elements meet
 * in pairs. Sorted by column first and then by row, so that each row's columns ascend. */
static struct matrix sparse(int rows, int nonzer) {
    double seed = 314159265.0;
    int each = nonzer + 1;
    int64_t to = 0, from = 0;
    int *vector = room((size_t)rows * each * sizeof *vector);
    int64_t *at = room((rows + 1) * sizeof *at), *put = room((rows + 1) * sizeof *put);
    struct matrix m = {rows, room((rows + 1) * sizeof(int64_t)), NULL, NULL};
    for (int i = 0; i < rows; i++) {
        for (int k = 0; k < nonzer; k++) vector[i * each + k] = (int)(next_random(&seed, A13) * rows);
        vector[i * each + nonzer] = i;
        for (int k = 0; k < each; k++) at[vector[i * each + k] + 1] += each;
    }
    for (int i = 0; i < rows; i++) at[i + 1] += at[i];
    memcpy(put, at, (rows + 1) * sizeof *put);
    int *row = room(at[rows] * sizeof(int));
    m.column = room(at[rows] * sizeof(int));
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < each; k++)
            for (int l = 0; l < each; l++) row[put[vector[i * each + k]]++] = vector[i * each + l];
    memcpy(put, at, (rows + 1) * sizeof *put);
    for (int column = 0; column < rows; column++)
        for (int64_t k = at[column]; k < at[column + 1]; k++) m.column[put[row[k]]++] = column;
    /* Equal ones become one; rows move together. */
    for (int i = 0; i < rows; i++) {
        m.start[i] = to;
        for (int64_t k = from; k < at[i + 1]; k++)
            if (to == m.start[i] || m.column[to - 1] != m.column[k]) m.column[to++] = m.column[k];
        from = at[i + 1];
    }
    m.start[rows] = to;
    m.value = room(to * sizeof(double));
    for (int i = 0; i < rows; i++)
        for (int64_t k = m.start[i]; k < m.start[i + 1]; k++) m.value[k] = m.column[k] == i ? 20.0 : 0.01 / each;
    free(vector);
    free(row);
    free(at);
    free(put);
    return m;
}

static void times(const struct matrix *m, const double *restrict p, double *restrict q) {
#pragma omp for
    for (int i = 0; i < m->rows; i++) {
        double sum = 0;
        for (int64_t k = m->start[i]; k < m->start[i + 1]; k++) sum += m->value[k] * p[m->column[k]];
        q[i] = sum;
    }
}

/* One outer iteration, of `inner` instead of 25 inner ones: inner + 1 products. */
static void cg(char class, int inners) {
    int rows = class == 'S' ? 1400 : class == 'W' ? 7000 : class == 'A' ? 14000 : class == 'B' ? 75000 : 150000;
    int nonzer = class == 'S' ? 7 : class == 'W' ? 8 : class == 'A' ? 11 : class == 'B' ? 13 : 15;
    struct matrix m = sparse(rows, nonzer);
    double *v[5], rho = 0, d = 0, next = 0, norm = 0;
    for (int k = 0; k < 5; k++) v[k] = room(rows * sizeof(double));
    double *x = v[0], *z = v[1], *p = v[2], *q = v[3], *r = v[4];
    for (int i = 0; i < rows; i++) x[i] = 1.0;
    syscall(BEGIN);
    rho = 0;
    {
#pragma omp parallel
        {
#pragma omp for reduction(+ : rho)
            for (int i = 0; i < rows; i++) {
                q[i] = z[i] = 0;
                r[i] = p[i] = x[i];
                rho += r[i] * r[i];
            }
            for (int inner = 0; inner < inners; inner++) {
                times(&m, p, q);
#pragma omp single
                d = next = 0;
#pragma omp for reduction(+ : d)
                for (int i = 0; i < rows; i++) d += p[i] * q[i];
                double alpha = rho / d;
#pragma omp for reduction(+ : next)
                for (int i = 0; i < rows; i++) {
                    z[i] += alpha * p[i];
                    r[i] -= alpha * q[i];
                    next += r[i] * r[i];
                }
                double beta = next / rho;
#pragma omp for
                for (int i = 0; i < rows; i++) p[i] = r[i] + beta * p[i];
#pragma omp single
                rho = next;
            }
            times(&m, z, r);
#pragma omp single
            norm = 0;
#pragma omp for reduction(+ : norm)
            for (int i = 0; i < rows; i++) norm += z[i] * z[i];
#pragma omp for
            for (int i = 0; i < rows; i++) x[i] = z[i] / sqrt(norm);
        }
    }
    printf("cg %lld nonzeros, %g\n", (long long)m.start[rows], norm);
}

/* ---- IS ---- */

static void is(char class, int iterations) {
    int key_bits = class == 'S' ? 16 : class == 'W' ? 20 : class == 'A' ? 23 : 25, max_bits = key_bits - 4;
    max_bits = class == 'S' ? 11 : class == 'W' ? 16 : class == 'A' ? 19 : max_bits;
    enum { BUCKETS = 1 << 10 };
    int keys = 1 << key_bits, range = 1 << max_bits, shift = max_bits - 10, threads = omp_get_max_threads();
    int *key = room(keys * sizeof(int)), *sorted = room(keys * sizeof(int)), *rank = room(range * sizeof(int));
    int(*sizes)[BUCKETS] = room((size_t)threads * sizeof *sizes);
    int starts[BUCKETS + 1];
    double seed = 314159265.0;
    for (int i = 0; i < keys; i++) {
        double sum = 0;
        for (int k = 0; k < 4; k++) sum += next_random(&seed, A13);
        key[i] = (int)(range / 4 * sum);
    }
    syscall(BEGIN);
    for (int step = 1; step <= iterations; step++) {
        key[step] = step;
        key[step + iterations] = range - step;
#pragma omp parallel
        {
            int me = omp_get_thread_num(), all = omp_get_num_threads(), at[BUCKETS];
            int *mine = sizes[me];
            memset(mine, 0, sizeof *sizes);
#pragma omp for schedule(static)
            for (int i = 0; i < keys; i++) mine[key[i] >> shift]++;
            int sum = 0;
            for (int b = 0; b < BUCKETS; b++) {
                if (me == 0) starts[b] = sum;
                for (int t = 0; t < all; t++) {
                    if (t == me) at[b] = sum;
                    sum += sizes[t][b];
                }
            }
            if (me == 0) starts[BUCKETS] = sum;
#pragma omp for schedule(static)
            for (int i = 0; i < keys; i++) sorted[at[key[i] >> shift]++] = key[i];
#pragma omp for schedule(dynamic)
            for (int b = 0; b < BUCKETS; b++) {
                int low = b << shift, high = (b + 1) << shift;
                for (int k = low; k < high; k++) rank[k] = 0;
                for (int i = starts[b]; i < starts[b + 1]; i++) rank[sorted[i]]++;
                rank[low] += starts[b];
                for (int k = low + 1; k < high; k++) rank[k] += rank[k - 1];
            }
        }
    }
    printf("is %d %d\n", rank[range / 2], sorted[keys / 2]);
}

/* ---- MG: grids with a border all around, which is the opposite side ---- */

struct grid { int n; double *at; };
#define AT(g, i, j, k) ((g).at[((size_t)(k) * ((g).n + 2) + (j)) * ((g).n + 2) + (i)])

static void border(struct grid g) {
    int n = g.n;
#pragma omp parallel for
    for (int k = 1; k <= n; k++) {
        for (int j = 1; j <= n; j++) {
            AT(g, 0, j, k) = AT(g, n, j, k);
            AT(g, n + 1, j, k) = AT(g, 1, j, k);
        }
        for (int i = 0; i <= n + 1; i++) {
            AT(g, i, 0, k) = AT(g, i, n, k);
            AT(g, i, n + 1, k) = AT(g, i, 1, k);
        }
    }
    size_t plane = (size_t)(n + 2) * (n + 2);
    memcpy(g.at, g.at + plane * n, plane * sizeof(double));
    memcpy(g.at + plane * (n + 1), g.at + plane, plane * sizeof(double));
}

/* Neighbours of a line that share an edge or a corner of the plane across it, summed once for each place of the line. */
static void sums(struct grid g, int j, int k, double *edge, double *corner) {
    for (int i = 0; i <= g.n + 1; i++) {
        edge[i] = AT(g, i, j - 1, k) + AT(g, i, j + 1, k) + AT(g, i, j, k - 1) + AT(g, i, j, k + 1);
        corner[i] = AT(g, i, j - 1, k - 1) + AT(g, i, j + 1, k - 1) + AT(g, i, j - 1, k + 1) + AT(g, i, j + 1, k + 1);
    }
}

enum { LONGEST = 1024 + 2 };

/* r = v - A u */
static void residual(struct grid u, struct grid v, struct grid r) {
    static const double a0 = -8.0 / 3.0, a2 = 1.0 / 6.0, a3 = 1.0 / 12.0;
    int n = u.n;
#pragma omp parallel for
    for (int k = 1; k <= n; k++)
        for (int j = 1; j <= n; j++) {
            double edge[LONGEST], corner[LONGEST];
            sums(u, j, k, edge, corner);
            for (int i = 1; i <= n; i++)
                AT(r, i, j, k) = AT(v, i, j, k) - a0 * AT(u, i, j, k) - a2 * (corner[i] + edge[i - 1] + edge[i + 1]) -
                                 a3 * (corner[i - 1] + corner[i + 1]);
        }
    border(r);
}

/* u = u + C r */
static void smooth(struct grid r, struct grid u) {
    static const double c0 = -3.0 / 17.0, c1 = 1.0 / 33.0, c2 = -1.0 / 61.0;
    int n = u.n;
#pragma omp parallel for
    for (int k = 1; k <= n; k++)
        for (int j = 1; j <= n; j++) {
            double edge[LONGEST], corner[LONGEST];
            sums(r, j, k, edge, corner);
            for (int i = 1; i <= n; i++)
                AT(u, i, j, k) += c0 * AT(r, i, j, k) + c1 * (AT(r, i - 1, j, k) + AT(r, i + 1, j, k) + edge[i]) +
                                  c2 * (corner[i] + edge[i - 1] + edge[i + 1]);
        }
    border(u);
}

static void restrict_to(struct grid fine, struct grid coarse) {
#pragma omp parallel for
    for (int k = 1; k <= coarse.n; k++)
        for (int j = 1; j <= coarse.n; j++) {
            double edge[LONGEST], corner[LONGEST];
            sums(fine, 2 * j, 2 * k, edge, corner);
            for (int i = 1; i <= coarse.n; i++) {
                int f = 2 * i;
                AT(coarse, i, j, k) =
                    0.5 * AT(fine, f, 2 * j, 2 * k) +
                    0.25 * (AT(fine, f - 1, 2 * j, 2 * k) + AT(fine, f + 1, 2 * j, 2 * k) + edge[f]) +
                    0.125 * (edge[f - 1] + edge[f + 1] + corner[f]) + 0.0625 * (corner[f - 1] + corner[f + 1]);
            }
        }
    border(coarse);
}

static void interpolate(struct grid coarse, struct grid fine) {
#pragma omp parallel for
    for (int k = 0; k <= coarse.n; k++)
        for (int j = 0; j <= coarse.n; j++) {
            double y[LONGEST], z[LONGEST], yz[LONGEST];
            for (int i = 0; i <= coarse.n + 1; i++) {
                y[i] = AT(coarse, i, j + 1, k) + AT(coarse, i, j, k);
                z[i] = AT(coarse, i, j, k + 1) + AT(coarse, i, j, k);
                yz[i] = AT(coarse, i, j + 1, k + 1) + AT(coarse, i, j, k + 1) + y[i];
            }
            for (int i = 0; i <= coarse.n; i++) {
                int f = 2 * i, g = 2 * j, h = 2 * k;
                AT(fine, f, g, h) += AT(coarse, i, j, k);
                AT(fine, f + 1, g, h) += 0.5 * (AT(coarse, i + 1, j, k) + AT(coarse, i, j, k));
                AT(fine, f, g + 1, h) += 0.5 * y[i];
                AT(fine, f + 1, g + 1, h) += 0.25 * (y[i] + y[i + 1]);
                AT(fine, f, g, h + 1) += 0.5 * z[i];
                AT(fine, f + 1, g, h + 1) += 0.25 * (z[i] + z[i + 1]);
                AT(fine, f, g + 1, h + 1) += 0.25 * yz[i];
                AT(fine, f + 1, g + 1, h + 1) += 0.125 * (yz[i] + yz[i + 1]);
            }
        }
}

static void clear(struct grid g) { memset(g.at, 0, (size_t)(g.n + 2) * (g.n + 2) * (g.n + 2) * sizeof(double)); }

static void mg(char class, int iterations) {
    int levels = class == 'S' ? 5 : class == 'W' ? 7 : 8;
    struct grid u[12], r[12], v = {1 << levels, NULL};
    for (int level = 1; level <= levels; level++) {
        size_t n = 1u << level, bytes = (n + 2) * (n + 2) * (n + 2) * sizeof(double);
        u[level] = (struct grid){(int)n, room(bytes)};
        r[level] = (struct grid){(int)n, room(bytes)};
        if (level == levels) v.at = room(bytes);
    }
    double seed = 314159265.0;
    for (int point = 0; point < 20; point++) {
        int place[3];
        for (int d = 0; d < 3; d++) place[d] = 1 + (int)(next_random(&seed, A13) * v.n);
        AT(v, place[0], place[1], place[2]) = point < 10 ? -1.0 : 1.0;
    }
    border(v);
    residual(u[levels], v, r[levels]);
    syscall(BEGIN);
    for (int step = 0; step < iterations; step++) {
        for (int level = levels; level > 1; level--) restrict_to(r[level], r[level - 1]);
        clear(u[1]);
        smooth(r[1], u[1]);
        for (int level = 2; level < levels; level++) {
            clear(u[level]);
            interpolate(u[level - 1], u[level]);
            residual(u[level], r[level], r[level]);
            smooth(r[level], u[level]);
        }
        interpolate(u[levels - 1], u[levels]);
        residual(u[levels], v, r[levels]);
        smooth(r[levels], u[levels]);
        residual(u[levels], v, r[levels]);
    }
    printf("mg %g\n", AT(r[levels], 1, 1, 1));
}

/* ---- FT ---- */

typedef struct { double re, im; } complex_t;

enum { BLOCK = 16 };

/* Transforms BLOCK lines at once, element by element beside each other: Stockham's radix-2 steps between two scratch arrays. */
static complex_t *transform(int n, const complex_t *roots, int most, complex_t *x, complex_t *y) {
    for (int half = 1; half < n; half *= 2) {
        int groups = n / (2 * half);
        for (int g = 0; g < groups; g++)
            for (int k = 0; k < half; k++) {
                complex_t w = roots[(size_t)k * (most / (2 * half))];
                const complex_t *a = x + (size_t)(g * half + k) * BLOCK, *b = a + (size_t)n / 2 * BLOCK;
                complex_t *c = y + (size_t)(g * 2 * half + k) * BLOCK, *d = c + (size_t)half * BLOCK;
                for (int l = 0; l < BLOCK; l++) {
                    double re = w.re * b[l].re - w.im * b[l].im, im = w.re * b[l].im + w.im * b[l].re;
                    c[l] = (complex_t){a[l].re + re, a[l].im + im};
                    d[l] = (complex_t){a[l].re - re, a[l].im - im};
                }
            }
        complex_t *swap = x;
        x = y;
        y = swap;
    }
    return x;
}

/* Along one dimension: n elements `stride` apart, for all lines, whose starts are `near` apart within a block, `far` beyond. */
static void along(complex_t *u, int n, size_t stride, int lines, size_t near, int others, size_t far,
                  const complex_t *roots, int most) {
#pragma omp parallel
    {
        complex_t *x = room((size_t)n * BLOCK * sizeof *x), *y = room((size_t)n * BLOCK * sizeof *y);
#pragma omp for
        for (int other = 0; other < others; other++)
            for (int first = 0; first < lines; first += BLOCK) {
                complex_t *start = u + other * far + first * near;
                if (near == 1) {
                    for (int i = 0; i < n; i++)
                        for (int l = 0; l < BLOCK; l++) x[(size_t)i * BLOCK + l] = start[i * stride + l];
                } else {
                    for (int l = 0; l < BLOCK; l++)
                        for (int i = 0; i < n; i++) x[(size_t)i * BLOCK + l] = start[i * stride + l * near];
                }
                complex_t *done = transform(n, roots, most, x, y);
                if (near == 1) {
                    for (int i = 0; i < n; i++)
                        for (int l = 0; l < BLOCK; l++) start[i * stride + l] = done[(size_t)i * BLOCK + l];
                } else {
                    for (int l = 0; l < BLOCK; l++)
                        for (int i = 0; i < n; i++) start[i * stride + l * near] = done[(size_t)i * BLOCK + l];
                }
            }
        free(x);
        free(y);
    }
}

static void ft(char class, int iterations) {
    int nx = class == 'S' ? 64 : class == 'W' ? 128 : class == 'A' ? 256 : 512;
    int ny = class == 'S' ? 64 : class == 'W' ? 128 : 256, nz = class == 'S' ? 64 : class == 'W' ? 32 : class == 'A' ? 128 : 256;
    size_t all = (size_t)nx * ny * nz;
    int most = nx > nz ? nx : nz;
    most = most > ny ? most : ny;
    complex_t *u0 = room(all * sizeof *u0), *u1 = room(all * sizeof *u1), *roots = room(most * sizeof *roots);
    double *decay = room(all * sizeof *decay), seed = 314159265.0, sum = 0;
    for (int k = 0; k < most; k++) roots[k] = (complex_t){cos(2 * M_PI * k / most), sin(2 * M_PI * k / most)};
    for (size_t i = 0; i < all; i++) {
        u0[i] = (complex_t){next_random(&seed, A13), 0.5};
        decay[i] = 1.0 - 1e-9 * (double)(i % nx);
    }
    syscall(BEGIN);
    for (int step = 0; step < iterations; step++) {
#pragma omp parallel for
        for (size_t i = 0; i < all; i++) {
            u0[i].re *= decay[i];
            u0[i].im *= decay[i];
            u1[i] = u0[i];
        }
        along(u1, nz, (size_t)nx * ny, nx, 1, ny, nx, roots, most);
        along(u1, ny, nx, nx, 1, nz, (size_t)nx * ny, roots, most);
        along(u1, nx, 1, ny, nx, nz, (size_t)nx * ny, roots, most);
        for (int j = 1; j <= 1024; j++) sum += u1[j % nx + (size_t)nx * (3 * j % ny + (size_t)ny * (5 * j % nz))].re;
    }
    printf("ft %g\n", sum);
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(char, int); } all[] = {
        {"cg", cg}, {"ep", ep}, {"ft", ft}, {"is", is}, {"mg", mg},
    };
    int iterations = argc == 4 ? atoi(argv[3]) : 0;
    for (size_t i = 0; i < sizeof all / sizeof *all && iterations > 0; i++)
        if (strcmp(argv[1], all[i].name) == 0 && strchr("SWABC", argv[2][0])) {
            all[i].run(argv[2][0], iterations);
            return 0;
        }
    fprintf(stderr, "usage: npb cg|ep|ft|is|mg S|W|A|B|C ITERATIONS (of ep: batches of 65536 pairs; of cg: inner ones)\n");
    return 2;
}
