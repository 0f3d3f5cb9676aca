/* Programs whose sources no package has, to be profiled: kernels NAME SIZE ROUNDS, with OpenMP's OMP_NUM_THREADS.
 *
 * Own code from published descriptions, with the data structures and the order of accesses that these describe:
 *   stream                  McCalpin's four loops over three arrays
 *   blackscholes            Bienia and others (PACT 2008): options as arrays of floats, priced one by one, round after round
 *   streamcluster           the same: gain of opening a centre, over all points of 128 dimensions; a shuffle of centres between
 *   canneal                 the same: two random elements of a net list change places if wires get shorter
 *   kmeans pca wc wr        Metis (Mao and others, 2010): maps over parts of the input into a table each, then a reduction
 *   pagerank bfs cc sssp    X-Stream (Roy and others, SOSP 2013): edges streamed, updates appended by partition, then gathered
 *   lbm                     D3Q19 lattice Boltzmann, two lattices, a cell's distributions side by side, as SPEC CPU2006 has it
 * At the start of the timed part a system call that does not exist tells the plugin of 'homenode profile' to count anew.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <omp.h>

#define BEGIN 0x686f6d65

static uint64_t state = 88172645463325252ull;

static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static double unit(void) { return (double)(draw() >> 11) * 0x1p-53; }

static void *room(size_t bytes) {
    void *p = malloc(bytes);
    if (!p) {
        fprintf(stderr, "kernels: no memory\n");
        exit(1);
    }
    memset(p, 0, bytes);
    return p;
}

static void stream(long n, int rounds) {
    double *a = room(n * sizeof *a), *b = room(n * sizeof *b), *c = room(n * sizeof *c);
    syscall(BEGIN);
    for (int round = 0; round < rounds; round++) {
#pragma omp parallel
        {
#pragma omp for
            for (long i = 0; i < n; i++) c[i] = a[i] + 0.0 * round;
#pragma omp for
            for (long i = 0; i < n; i++) b[i] = 3.0 * c[i];
#pragma omp for
            for (long i = 0; i < n; i++) c[i] = a[i] + b[i];
#pragma omp for
            for (long i = 0; i < n; i++) a[i] = b[i] + 3.0 * c[i];
        }
    }
    printf("stream %g\n", a[n / 2]);
}

/* Cumulative normal distribution, by the polynomial of Abramowitz and Stegun. */
static float normal(float x) {
    float k = 1.0f / (1.0f + 0.2316419f * fabsf(x)), sum = 1.330274429f;
    sum = sum * k - 1.821255978f;
    sum = sum * k + 1.781477937f;
    sum = sum * k - 0.356563782f;
    sum = (sum * k + 0.319381530f) * k;
    float tail = expf(-0.5f * x * x) * 0.39894228f * sum;
    return x < 0 ? tail : 1.0f - tail;
}

static void blackscholes(long n, int rounds) {
    float *spot = room(n * 4), *strike = room(n * 4), *rate = room(n * 4), *volatility = room(n * 4), *years = room(n * 4);
    int *put = room(n * 4);
    float *price = room(n * 4);
    for (long i = 0; i < n; i++) {
        spot[i] = 50 + 50 * unit();
        strike[i] = 50 + 50 * unit();
        rate[i] = 0.05;
        volatility[i] = 0.1 + 0.4 * unit();
        years[i] = 0.1 + unit();
        put[i] = draw() & 1;
    }
    syscall(BEGIN);
    for (int round = 0; round < rounds; round++)
#pragma omp parallel for
        for (long i = 0; i < n; i++) {
            float root = sqrtf(years[i]), spread = volatility[i] * root;
            float d1 = (logf(spot[i] / strike[i]) + (rate[i] + 0.5f * volatility[i] * volatility[i]) * years[i]) / spread;
            float n1 = normal(d1), n2 = normal(d1 - spread), later = strike[i] * expf(-rate[i] * years[i]);
            price[i] = put[i] ? later * (1 - n2) - spot[i] * (1 - n1) : spot[i] * n1 - later * n2;
        }
    printf("blackscholes %g\n", price[n / 2]);
}

static void streamcluster(long n, int rounds) {
    enum { DIMENSIONS = 128 };
    struct point { float weight, *at; long centre; float cost; } *points = room(n * sizeof *points);
    float *all = room(n * DIMENSIONS * sizeof *all), gain = 0, lost = 0;
    char *change = room(n);
    for (long i = 0; i < n; i++) {
        points[i] = (struct point){1.0f, all + i * DIMENSIONS, 0, 1e3f};
        for (int d = 0; d < DIMENSIONS; d++) points[i].at[d] = unit();
    }
    syscall(BEGIN);
    for (int round = 0; round < rounds; round++) {
        const float *x = points[draw() % n].at;
        gain = 0;
#pragma omp parallel for reduction(+ : gain, lost)
        for (long i = 0; i < n; i++) {
            float distance = 0;
            for (int d = 0; d < DIMENSIONS; d++) distance += (points[i].at[d] - x[d]) * (points[i].at[d] - x[d]);
            float cost = distance * points[i].weight;
            change[i] = cost < points[i].cost;
            if (change[i]) gain += points[i].cost - cost;
            else lost += points[i].cost - cost;
        }
        if (gain > 0.01f * n)
#pragma omp parallel for
            for (long i = 0; i < n; i++)
                if (change[i]) points[i].cost *= 0.99f;
    }
    printf("streamcluster %g %g\n", gain, lost);
}

struct place { int x, y; };
struct element { char name[16]; struct element **wires; int count; struct place *at; };

static double length_at(const struct element *of, const struct place *there) {
    double sum = 0;
    for (int w = 0; w < of->count; w++) {
        const struct place *other = of->wires[w]->at;
        sum += abs(other->x - there->x) + abs(other->y - there->y);
    }
    return sum;
}

static void canneal(long n, int rounds) {
    struct element *elements = room(n * sizeof *elements);
    struct place *places = room(n * sizeof *places);
    long swaps = 0;
    for (long i = 0; i < n; i++) {
        elements[i].count = 2 + draw() % 8;
        elements[i].wires = room(elements[i].count * sizeof(struct element *));
        elements[i].at = &places[i];
        places[i] = (struct place){(int)(i % 2048), (int)(i / 2048)};
        for (int w = 0; w < elements[i].count; w++) elements[i].wires[w] = &elements[draw() % n];
    }
    syscall(BEGIN);
    double temperature = 2000;
    struct element *a = &elements[draw() % n], *b;
    for (int round = 0; round < rounds; round++, temperature /= 1.5)
        for (int step = 0; step < 15000; step++) {
            b = &elements[draw() % n];
            double change = length_at(a, b->at) - length_at(a, a->at) + length_at(b, a->at) - length_at(b, b->at);
            if (change < 0 || unit() < exp(-change / temperature)) {
                struct place *at = a->at;
                a->at = b->at;
                b->at = at;
                swaps++;
            }
            a = b;
        }
    printf("canneal %ld\n", swaps);
}

static void kmeans(long n, int rounds) {
    enum { DIMENSIONS = 3, MEANS = 24 };
    int *points = room(n * DIMENSIONS * sizeof *points), *nearest = room(n * sizeof *nearest);
    double means[MEANS][DIMENSIONS];
    for (long i = 0; i < n * DIMENSIONS; i++) points[i] = (int)(draw() % 1000);
    for (int m = 0; m < MEANS; m++)
        for (int d = 0; d < DIMENSIONS; d++) means[m][d] = points[m * DIMENSIONS + d];
    syscall(BEGIN);
    for (int round = 0; round < rounds; round++) {
        double sums[MEANS * (DIMENSIONS + 1)] = {0};
#pragma omp parallel for reduction(+ : sums)
        for (long i = 0; i < n; i++) {
            double best = 1e300;
            int at = 0;
            for (int m = 0; m < MEANS; m++) {
                double distance = 0;
                for (int d = 0; d < DIMENSIONS; d++) {
                    double off = points[i * DIMENSIONS + d] - means[m][d];
                    distance += off * off;
                }
                if (distance < best) best = distance, at = m;
            }
            nearest[i] = at;
            for (int d = 0; d < DIMENSIONS; d++) sums[at * (DIMENSIONS + 1) + d] += points[i * DIMENSIONS + d];
            sums[at * (DIMENSIONS + 1) + DIMENSIONS] += 1;
        }
        for (int m = 0; m < MEANS; m++)
            for (int d = 0; d < DIMENSIONS; d++)
                means[m][d] = sums[m * (DIMENSIONS + 1) + d] / fmax(1, sums[m * (DIMENSIONS + 1) + DIMENSIONS]);
    }
    printf("kmeans %g %d\n", means[0][0], nearest[n / 2]);
}

/* n rows, as many columns: means of rows, then the covariance of each of some rows with all that follow. */
static void pca(long n, int rows) {
    int *matrix = room(n * n * sizeof *matrix);
    long long *means = room(n * sizeof *means), *covariance = room(n * sizeof *covariance);
    for (long i = 0; i < n * n; i++) matrix[i] = (int)(draw() % 100);
    syscall(BEGIN);
#pragma omp parallel for
    for (long i = 0; i < n; i++) {
        long long sum = 0;
        for (long k = 0; k < n; k++) sum += matrix[i * n + k];
        means[i] = sum / n;
    }
    for (int row = 0; row < rows; row++)
#pragma omp parallel for
        for (long i = row; i < n; i++) {
            long long sum = 0;
            for (long k = 0; k < n; k++) sum += (matrix[row * n + k] - means[row]) * (matrix[i * n + k] - means[i]);
            covariance[i] = sum / (n - 1);
        }
    printf("pca %lld\n", covariance[n / 2]);
}

/* n bytes of words of a vocabulary, frequent ones more often. */
static char *text(long n) {
    char *to = room(n + 16);
    for (long at = 0; at < n;) {
        uint64_t word = (uint64_t)exp(unit() * log(300000));
        uint64_t letters = word * 0x9e3779b97f4a7c15ull;
        for (int length = 2 + (int)(log2((double)word + 2) / 2.2); length > 0 && at < n; length--, letters /= 26)
            to[at++] = 'a' + letters % 26;
        to[at++] = ' ';
    }
    to[n] = 0;
    return to;
}

struct word { struct word *next; const char *letters; int length; long count, room; long *where; };
enum { TABLE = 1 << 16 };

static struct word *find(struct word **table, const char *letters, int length) {
    uint32_t hash = 2166136261u;
    for (int i = 0; i < length; i++) hash = (hash ^ (unsigned char)letters[i]) * 16777619u;
    struct word **at = &table[hash % TABLE];
    for (; *at; at = &(*at)->next)
        if ((*at)->length == length && memcmp((*at)->letters, letters, length) == 0) return *at;
    *at = room(sizeof **at);
    (*at)->letters = letters;
    (*at)->length = length;
    return *at;
}

static void words(long n, int index) {
    char *from = text(n);
    int threads = omp_get_max_threads();
    struct word ***tables = room(threads * sizeof *tables);
    for (int t = 0; t < threads; t++) tables[t] = room(TABLE * sizeof **tables);
    long all = 0;
    syscall(BEGIN);
#pragma omp parallel for schedule(static)
    for (int part = 0; part < threads; part++) {
        long end = n / threads * (part + 1);
        for (long at = n / threads * part; at < end;) {
            long start = at;
            while (at < end && from[at] != ' ') at++;
            struct word *word = find(tables[part], from + start, (int)(at++ - start));
            if (index) {
                if (word->count == word->room) {
                    word->room = 2 * word->room + 2;
                    word->where = realloc(word->where, word->room * sizeof(long));
                }
                word->where[word->count] = start;
            }
            word->count++;
        }
    }
    for (int t = 1; t < threads; t++)
        for (int at = 0; at < TABLE; at++)
            for (struct word *word = tables[t][at]; word; word = word->next)
                find(tables[0], word->letters, word->length)->count += word->count;
    for (int at = 0; at < TABLE; at++)
        for (struct word *word = tables[0][at]; word; word = word->next) all += word->count > 1;
    printf("words %ld\n", all);
}

static void wc(long n, int rounds) { (void)rounds; words(n, 0); }
static void wr(long n, int rounds) { (void)rounds; words(n, 1); }

/* ---- X-Stream: n vertices, 16 edges of each on average, by RMAT (0.57, 0.19, 0.19, 0.05); 16 partitions of vertices ---- */

enum { PARTITIONS = 16, PAGERANK, BFS, CC, SSSP };
struct edge { uint32_t from, to; float weight; };
struct update { uint32_t to; float value; };

static void edges_of(long n, long count, struct edge *edges) {
    for (long e = 0; e < count; e++) {
        uint32_t from = 0, to = 0;
        for (long half = n / 2; half > 0; half /= 2) {
            double p = unit();
            if (p >= 0.57 && (p < 0.76 || p >= 0.95)) to += half;
            if (p >= 0.76) from += half;
        }
        edges[e] = (struct edge){from, to, 1 + (float)unit()};
    }
}

static void graph(long n, int rounds, int kind) {
    long count = 16 * n, size = n / PARTITIONS, sent = 0;
    struct edge *drawn = room(count * sizeof *drawn), *edges = room(count * sizeof *edges);
    struct update *updates = room(count * sizeof *updates);
    long begins[PARTITIONS + 1] = {0}, fills[PARTITIONS], wants[PARTITIONS + 1] = {0}, at[PARTITIONS];
    float *value = room(n * sizeof *value), *sum = room(n * sizeof *sum);
    int *degree = room(n * sizeof *degree), *round_of = room(n * sizeof *round_of);
    edges_of(n, count, drawn);
    for (long e = 0; e < count; e++) {
        begins[drawn[e].from / size + 1]++;
        wants[drawn[e].to / size + 1]++;
        degree[drawn[e].from]++;
    }
    for (int p = 0; p < PARTITIONS; p++) begins[p + 1] += begins[p], wants[p + 1] += wants[p], at[p] = begins[p];
    for (long e = 0; e < count; e++) edges[at[drawn[e].from / size]++] = drawn[e];
    free(drawn);
    for (long v = 0; v < n; v++) value[v] = kind == PAGERANK ? 1.0f / n : kind == CC ? (float)v : v == 0 ? 0 : 1e30f;
    syscall(BEGIN);
    for (int round = 1; round <= rounds; round++) {
        memcpy(fills, wants, sizeof fills);
        for (int p = 0; p < PARTITIONS; p++)
            for (long e = begins[p]; e < begins[p + 1]; e++) {
                uint32_t from = edges[e].from;
                if (kind != PAGERANK && round > 1 && round_of[from] < round - 1) continue;
                if (kind != CC && value[from] >= 1e30f) continue;
                float says = kind == PAGERANK ? value[from] / degree[from]
                             : kind == CC     ? value[from]
                             : kind == BFS    ? value[from] + 1
                                              : value[from] + edges[e].weight;
                updates[fills[edges[e].to / size]++] = (struct update){edges[e].to, says};
            }
        for (int p = 0; p < PARTITIONS; p++)
            for (long u = wants[p]; u < fills[p]; u++, sent++) {
                uint32_t to = updates[u].to;
                if (kind == PAGERANK) sum[to] += updates[u].value;
                else if (updates[u].value < value[to]) value[to] = updates[u].value, round_of[to] = round;
            }
        for (long v = 0; kind == PAGERANK && v < n; v++) value[v] = 0.15f / n + 0.85f * sum[v], sum[v] = 0;
    }
    printf("graph %ld updates, %g\n", sent, value[n / 3]);
}

static void pagerank(long n, int rounds) { graph(n, rounds, PAGERANK); }
static void bfs(long n, int rounds) { graph(n, rounds, BFS); }
static void cc(long n, int rounds) { graph(n, rounds, CC); }
static void sssp(long n, int rounds) { graph(n, rounds, SSSP); }

/* n planes of 100 x 100 cells, each with 19 distributions and a flag. */
static void lbm(long n, int rounds) {
    enum { X = 100, Y = 100, Q = 20 };
    static const int c[19][3] = {{0, 0, 0},  {0, 1, 0},  {0, -1, 0}, {1, 0, 0},  {-1, 0, 0}, {0, 0, 1},  {0, 0, -1},
                                 {1, 1, 0},  {-1, 1, 0}, {1, -1, 0}, {-1, -1, 0}, {0, 1, 1},  {0, 1, -1}, {0, -1, 1},
                                 {0, -1, -1}, {1, 0, 1},  {1, 0, -1}, {-1, 0, 1}, {-1, 0, -1}};
    long margin = X * Y + X + 1, cells = (n + 2) * X * Y + 2 * margin, to[19];
    double *a = room(cells * Q * 8), *b = room(cells * Q * 8);
    for (int q = 0; q < 19; q++) to[q] = (c[q][0] + (long)X * c[q][1] + (long)X * Y * c[q][2]) * Q + q;
    for (long i = 0; i < cells * Q; i++) a[i] = i % Q < 19 ? 1.0 / 19 : 0;
    syscall(BEGIN);
    for (int round = 0; round < rounds; round++) {
#pragma omp parallel for
        for (long i = margin; i < cells - margin; i++) {
            const double *f = a + i * Q;
            double rho = 0, u[3] = {0};
            for (int q = 0; q < 19; q++) {
                rho += f[q];
                for (int d = 0; d < 3; d++) u[d] += c[q][d] * f[q];
            }
            for (int d = 0; d < 3; d++) u[d] /= rho;
            double square = 1.5 * (u[0] * u[0] + u[1] * u[1] + u[2] * u[2]);
            for (int q = 0; q < 19; q++) {
                double along = c[q][0] * u[0] + c[q][1] * u[1] + c[q][2] * u[2];
                double w = q == 0 ? 1.0 / 3 : q < 7 ? 1.0 / 18 : 1.0 / 36;
                b[i * Q + to[q]] = -0.95 * f[q] + 1.95 * w * rho * (1 + along * (4.5 * along + 3) - square);
            }
        }
        double *swap = a;
        a = b;
        b = swap;
    }
    printf("lbm %g\n", a[cells / 2 * Q]);
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(long, int); } all[] = {
        {"stream", stream}, {"blackscholes", blackscholes}, {"streamcluster", streamcluster}, {"canneal", canneal},
        {"kmeans", kmeans}, {"pca", pca}, {"wc", wc}, {"wr", wr}, {"pagerank", pagerank}, {"bfs", bfs}, {"cc", cc},
        {"sssp", sssp}, {"lbm", lbm},
    };
    long size = argc == 4 ? atol(argv[2]) : 0;
    int rounds = argc == 4 ? atoi(argv[3]) : 0;
    for (size_t i = 0; i < sizeof all / sizeof *all && size > 0 && rounds > 0; i++)
        if (strcmp(argv[1], all[i].name) == 0) {
            all[i].run(size, rounds);
            return 0;
        }
    fprintf(stderr, "usage: kernels NAME SIZE ROUNDS, NAME as in the comment at the head of the source\n");
    return 2;
}
