"""The programs of [Policies] before scripts/numa-workloads.py fits them: estimates, program by program."""

# ---- The programs: estimates before the fit -----------------------------------------------------------------------------
#
# cpi: cycles per instruction with every LLC access free. flight, hits: misses and LLC hits in flight. write: share of missed
# lines written back. miss: m_inf, c0, k of the LLC miss ratio. tlb: accesses per kilo-instruction, then m_inf, c0, k of the
# TLB miss ratio: at 2 MiB of reach SMALL 6 misses in 100000 accesses (streams: one walk serves many lines), SOME 1 in 1000,
# MANY 4 in 1000.
# barrier: what waiting threads do, then million instructions between barriers (None: from table 2) and imbalance.

K, M = 2**10, 2**20
SMALL, SOME, MANY = (0.0, 1 * K, 0.3), (0.0, 1 * K, 0.25), (0.0, 2 * K, 0.25)


def program(suite, about, cpi, flight, hits, write, miss, tlb, barrier=None, instructions=None, note=None, release_us=None):
    names = "suite about cpi flight hits write miss tlb barrier instructions note release_us".split()
    values = suite, about, cpi, flight, hits, write, miss, tlb, barrier, instructions, note, release_us
    return dict(zip(names, values))


SHARING = "lines that threads pass to each other miss at any size of cache: the program itself is small"
STREAMS = "data much larger than the cache is read once per pass"
# X-Stream's threads go through a stream unit of 16 MiB together (core/autotuner.hpp, OPTIMUM_STREAM_UNIT), and meet six times for each
# (core/x-lib.hpp, split_stream.hpp) at a barrier that spins (utils/barrier.h). Then they have the next from the disk, or wait for it.
STREAM_UNIT, MEETINGS = 16 * 2**20, 6
BUFFERS = ("spin", "stream unit", 0.02)
SWEEPS = "as in class B: sweeps over arrays much larger than the cache"

PROGRAMS = {
    "bodytrack": program(
        "parsec", "Tracks a person in camera images", 0.7, 3, 6, 0.15, (0.6, 1 * M, 1), (380, *SMALL), note=SHARING,
    ),
    "facesim": program(
        "parsec", "Simulates a face's muscles", 0.7, 4, 6, 0.3, (0.3, 2 * M, 1), (400, *SOME), ("sleep", None, 0.03),
    ),
    "fluidanimate": program(
        "parsec", "Fluid dynamics by particles", 0.8, 3, 5, 0.3, (0.3, 2 * M, 1), (380, *SOME), ("sleep", None, 0.05)
    ),
    "streamcluster": program(
        "parsec", "Clusters a stream of points", 0.7, 6, 6, 0.05, (0.4, 4 * M, 1), (400, *SMALL), ("sleep", None, 0.02)
    ),
    "swaptions": program(
        "parsec", "Prices swaptions by Monte Carlo", 0.8, 2, 5, 0.1, (0.6, 1 * M, 1), (350, *SMALL), note=SHARING,
    ),
    "x264": program("parsec", "Encodes video", 0.7, 4, 6, 0.25, (0.3, 1 * M, 1), (380, *SOME)),
    "bt.C": program(
        "npb", "Block tridiagonal solver, 162^3 grid, 200 steps", 0.75, 5, 5, 0.4, (0.4, 1 * M, 1), (380, *SOME),
        ("spin", 35.4, 0.03), (70.9, "2834 G operations x 1.2 instructions (as bt.B) over 48 threads"), SWEEPS,
    ),
    "cg.C": program(
        "npb", "Conjugate gradient: sparse matrix times vector", 0.5, 8, 5, 0.03, (0.25, 800 * K, 1.5), (420, *MANY),
        ("spin", 0.98, 0.02), (9.5, "75 x 26 products x 36.1 M nonzeros x 6.5 instructions (as cg.B) over 48 threads"),
        "as in class B, with a vector of 1.2 MB",
    ),
    "dc.B": program(
        "npb", "Data cube: sorts and sums groups of records", 1.0, 3, 4, 0.3, (0.3, 8 * M, 0.6), (350, *SOME),
    ),
    "ep.D": program(
        "npb", "Embarrassingly parallel random pairs", 1.2, 8, 5, 0.1, (0.5, 512 * K, 1), (350, *SMALL), None,
        (153.0, "2^36 pairs x 100 operations x 1.07 instructions (as ep.B) over 48 threads"), SHARING,
    ),
    "ft.C": program(
        "npb", "3-D fast Fourier transform, 512^3, 20 iterations", 0.65, 8, 6, 0.5, (0.7, 512 * K, 1), (400, *MANY),
        ("spin", 107.0, 0.02), (10.7, "396 G operations x 1.3 instructions (as ft.B) over 48 threads"), SWEEPS,
    ),
    "lu.C": program(
        "npb", "SSOR solver with a wavefront, 162^3 grid, 250 steps", 0.75, 5, 5, 0.35, (0.6, 1 * M, 1), (380, *SOME),
        ("spin", 5.74, 0.04), (57.4, "2041 G operations x 1.35 instructions (as lu.B) over 48 threads"), SWEEPS,
    ),
    "mg.D": program(
        "npb", "Multigrid, 1024^3 grid, 50 cycles", 0.55, 8, 6, 0.4, (0.7, 1 * M, 1), (400, *SOME),
        ("spin", 135.0, 0.03), (81.1, "3114 G operations x 1.25 instructions (as mg.B) over 48 threads"), SWEEPS,
    ),
    "sp.C": program(
        "npb", "Scalar pentadiagonal solver, 162^3 grid, 400 steps", 0.65, 7, 6, 0.4, (0.6, 1 * M, 1), (380, *SOME),
        ("spin", 12.6, 0.03), (75.5, "2899 G operations x 1.25 instructions (as sp.B) over 48 threads"), SWEEPS,
    ),
    "ua.C": program(
        "npb", "Heat in an adaptive mesh", 0.8, 4, 5, 0.3, (0.4, 2 * M, 0.8), (380, *MANY), ("sleep", None, 0.04)
    ),
    "wc": program("mosbench", "Metis: counts words", 0.9, 3, 5, 0.3, (0.3, 4 * M, 0.7), (370, *SOME)),
    "wr": program("mosbench", "Metis: inverted index of words", 0.9, 3, 5, 0.3, (0.3, 4 * M, 0.7), (370, *SOME)),
    "wrmem": program(
        "mosbench", "Metis: inverted index of words in memory", 0.9, 3, 5, 0.3, (0.3, 4 * M, 0.7), (370, *SOME), release_us=15,
    ),
    "pca": program(
        "mosbench", "Metis: principal components of a matrix", 0.5, 8, 6, 0.05, (0.8, 1 * M, 1), (400, *SMALL), note=STREAMS,
    ),
    "kmeans": program(
        "mosbench", "Metis: clusters points", 0.5, 8, 6, 0.05, (0.8, 1 * M, 1), (400, *SMALL), note=STREAMS,
    ),
    "psearchy": program("mosbench", "Indexes files", 0.9, 4, 5, 0.3, (0.4, 4 * M, 0.7), (370, *SOME)),
    "memcached": program("mosbench", "Key-value store in memory", 1.2, 2, 4, 0.2, (0.4, 4 * M, 0.6), (400, *SOME)),
    "belief": program(
        "xstream", "Belief propagation, edges streamed", 0.8, 6, 5, 0.3, (0.5, 2 * M, 0.7), (350, *SMALL), BUFFERS, note=STREAMS,
    ),
    "bfs": program(
        "xstream", "Breadth-first search, edges streamed", 0.8, 6, 5, 0.3, (0.5, 2 * M, 0.7), (350, *SMALL), BUFFERS, note=STREAMS,
    ),
    "cc": program(
        "xstream", "Connected components, edges streamed", 0.8, 6, 5, 0.3, (0.5, 2 * M, 0.7), (350, *SMALL), BUFFERS, note=STREAMS,
    ),
    "pagerank": program(
        "xstream", "PageRank, edges streamed", 0.8, 6, 5, 0.3, (0.5, 2 * M, 0.7), (350, *SMALL), BUFFERS, note=STREAMS,
    ),
    "sssp": program(
        "xstream", "Shortest paths from a source, edges streamed", 0.8, 6, 5, 0.3, (0.5, 2 * M, 0.7), (350, *SMALL), BUFFERS, note=STREAMS,
    ),
    "cassandra": program("ycsb", "YCSB on Cassandra (Java)", 1.4, 2, 4, 0.25, (0.3, 4 * M, 0.6), (380, *SOME)),
    "mongodb": program("ycsb", "YCSB on MongoDB", 1.3, 2, 4, 0.25, (0.3, 4 * M, 0.6), (380, *SOME)),
}
