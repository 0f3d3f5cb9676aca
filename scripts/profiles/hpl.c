/* Solves a dense system of equations as HPL does, by OpenBLAS: hpl ORDER. Own code; to be profiled. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern void dgetrf_(const int *rows, const int *columns, double *a, const int *lead, int *pivots, int *info);
extern void dgetrs_(const char *how, const int *n, const int *sides, const double *a, const int *lead, const int *pivots,
                    double *b, const int *lead_b, int *info);

int main(int argc, char **argv) {
    int n = argc == 2 ? atoi(argv[1]) : 0, info = 0, one = 1;
    double *a = malloc(sizeof *a * n * n), *b = malloc(sizeof *b * n);
    int *pivots = malloc(sizeof *pivots * n);
    if (n <= 0 || !a || !b || !pivots) {
        fprintf(stderr, "usage: hpl ORDER\n");
        return 2;
    }
    srand(1);
    for (long i = 0; i < (long)n * n; i++) a[i] = rand() / (double)RAND_MAX - 0.5;
    for (int i = 0; i < n; i++) b[i] = 1;
    syscall(0x686f6d65); /* counts begin here */
    dgetrf_(&n, &n, a, &n, pivots, &info);
    if (info == 0) dgetrs_("N", &n, &one, a, &n, pivots, b, &n, &info);
    printf("hpl %d %g\n", info, b[0]);
    return info != 0;
}
