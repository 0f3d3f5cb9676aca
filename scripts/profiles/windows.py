#!/usr/bin/env python3
"""Which memory the programs of [Policies] use at a time, from their sources, and how unevenly they use pages, as measured.

    scripts/profiles/windows.py     fails if the table is incomplete or the arrays' sizes contradict [Policies, table 2]

WINDOWS has an entry per program:

- kind: the kind of region that the entry is about.
- parts, passes: the region falls into `parts` parts of equal size, in the order of the guest's frames. One part is in use at a
  time; the run goes through all of them `passes` times. passes = 1 / parts: only the first part is used.
- source: file and routine that show it. "estimate:" if they leave it open.
- mib, if the sources give it: size of the region, all threads together.
- arrays, if the sources give them: (name, MiB, share of the cache lines that the program moves). They are then regions of their
  own, in place of the parts.

The rule for `parts`, the same for all programs: the region's bytes over the bytes in use at a time (weighted by work), to the
nearest integer, and a half down. It applies only if phases leave out large arrays that other phases use, or if a part is never
used after the start. If phases share most of their arrays, parts is 1: such pages differ in heat, not in time. No value was
chosen by a result of the twin.

Versions read: NPB 3.3.1 (OpenMP), Metis of 2010 (in Mosbench) and of 2013, X-Stream of 2015, Parsec 2.1 and 3.0.
"""

import csv
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
M = 2**20
THREADS = 48


def table_2():
    lines = (ROOT / "data/published/numa-policies-table2.csv").read_text().splitlines()
    return {row["app"]: row for row in csv.DictReader(line for line in lines if not line.startswith("#"))}


# ---- Sizes of arrays, MiB --------------------------------------------------------------------------------------------

# FT: u0 and u1 are complex, twiddle is real, (512 + 1) x 512 x 512 points.
FT_POINTS = 513 * 512 * 512 / M
# BT, SP, LU: one double per point of the padded grid, 163 x 163 x 162.
GRID = 163 * 163 * 162 * 8 / M
# MG: v has a value per point; u and r also have the coarser grids, a seventh more.
MG_V = 1026**3 * 8 / M
# CG: nonzeros that makea keeps (the matrix of class C), of (nonzer + 1)^2 n = 38.4 M that are declared.
CG_NONZEROS, CG_ROWS = 36_121_058 / M, 150_000 / M
CG_SOLVER = CG_NONZEROS * (8 + 4) + CG_ROWS * (5 * 8 + 4)
CG_MAKEA = CG_NONZEROS * (8 + 4) + CG_ROWS * (16 * (8 + 4) + 2 * 4)

# Arrays of the whole program by the sources, to compare with the footprint of table 2.
DECLARED = {
    "ft.C": FT_POINTS * (16 + 16 + 8),
    "cg.C": CG_SOLVER + CG_MAKEA,
    "mg.D": MG_V * (1 + 2 * 8 / 7),
    # u, rhs, forcing of 5; us, vs, ws, qs, rho_i, square.
    "bt.C": GRID * 21,
    # The same and speed; lhs, lhsp, lhsm of each thread.
    "sp.C": GRID * 22 + THREADS * 3 * 5 * 163 * 163 * 8 / M,
    # u, rsd, frct of 5; qs, rho_i; eight Jacobians of a plane.
    "lu.C": GRID * 17 + 8 * 25 * 163 * 162 * 8 / M,
    # 8 fields of 5^3 points an element; 8 of mortar points and their locks; idmo, idel; coordinates; emo.
    "ua.C": (33_500 * (8 * 125 * 8 + 600 * 4 + 150 * 4 + 6 * 8 * 8 + 128 * 4) + 1_262_100 * 9 * 8) / M,
    # x(2 * 2^16) of each thread.
    "ep.D": THREADS * 2**17 * 8 / M,
    # One chunk of 200,000 points of 128 floats.
    "streamcluster": 200_000 * (128 * 4 + 32) / M,
}


# ---- Windows ---------------------------------------------------------------------------------------------------------

# Metis: 16 map tasks per core (def_nsplits_per_core), in the order of the input; a counter gives each thread the next one.
# So 48 of 48 x 16 tasks, all neighbours, are in use: a sixteenth of the input.
METIS_PARTS = 16
# Metis' own test (test/run_all.py) gives kmeans the arguments "10 16 N 40". Its points, (i j) mod 40 + 1, have a period of 40, so
# the number of rounds until no point changes its cluster, 5, hardly depends on N. Other arguments need 16 to 168 rounds;
# [Policies] does not state them.
KMEANS_ROUNDS = 5
# pca: a square matrix (as in Metis' own test, -R 2048 -C 2048) of R rows has 4 R^2 bytes. Each of the R^2 / 2 pairs of rows
# leaves a key of 64 bytes, a covariance, a leaf's entry of 40 at a fill of 0.7, an array of values and a result of 16: estimate
# 240 bytes (160 to 320), so the matrix is 4 / (4 + 240 / 2) of all memory (2.4 to 4.8 percent).
PCA_MATRIX = 4 / (4 + 240 / 2)

# X-Stream: calculate_ram_budget divides the memory, 12 GiB here (table 2), into max_buffers() + 1 = 5 equal buffers. Threads use
# two at a time: input and auxiliary buffer (make_index), then auxiliary and output buffer. The disk reads or writes the others.
XSTREAM_PARTS = 2  # 5 / 2, a half down
# A buffer is used once for each time the disk fills or empties it, so passes are the disk's bytes in a run over the memory. A run
# of 60 s is scripts/numa-workloads.py's choice, the disk's rate is that of table 2.
RUN_S = 60.0


def xstream(algorithm):
    row = table_2()[algorithm]
    return {
        "kind": "initialised-by-one",
        "parts": XSTREAM_PARTS,
        "passes": round(float(row["disk_mb_per_s"]) * RUN_S / float(row["footprint_mb"]), 2),
        "source": "X-Stream core/autotuner.hpp calculate_ram_budget(), split_stream.hpp make_index(), x-lib.hpp work: 2 of 5 "
        "buffers are in use at a time; the main thread maps and locks them all",
    }


def whole(kind, source, **more):
    return {"kind": kind, "parts": 1, "passes": 1.0, "source": source} | more


WINDOWS = {
    # -- NPB. Loops are static: each thread has a slab of each array, so all slabs of the arrays in use are in use.
    # Work: ft.f counts 7.21113 ln n = 135 operations a point for the transform and 5.2 for the rest of an iteration, n = 2^27, so
    # u1 is used alone for 0.963 of it: 5130 MiB over 0.963 x 2052 + 0.037 x 5130 = 2166 MiB is 2.4. Passes: 20 iterations (class
    # C), each of which evolves once and transforms once. Lines: cffts1, cffts2 and cffts3 move u1 once each, evolve moves u0,
    # twiddle and u1 once: u1 has 4 x 2 of 11, u0 2, twiddle 1. (cffts3 is parallel over j, all else over k, as init_ui was: 2 of
    # 11 lines are in planes that other threads touched first.)
    "ft.C": {
        "kind": "private",
        "parts": 2,
        "passes": 20.0,
        "source": "NPB3.3-OMP FT/ft.f fft(-1, u1, u1): cffts3, cffts2, cffts1 work on u1 alone; evolve: u0 *= twiddle, u1 = u0",
        "arrays": [("u1", FT_POINTS * 16, 8 / 11), ("u0", FT_POINTS * 16, 2 / 11), ("twiddle", FT_POINTS * 8, 1 / 11)],
    },
    # makea's v, iv, aelt and acol, as large as the matrix, are not used by the 75 timed iterations: 862 over 420 MiB is 2.1.
    "cg.C": {
        "kind": "private",
        "parts": 2,
        "passes": 0.5,
        "source": "NPB3.3-OMP CG/cg.f: makea fills v, iv, aelt, acol and never again; conj_grad reads a, colidx and five vectors",
        "arrays": [("solver", CG_SOLVER, 1.0), ("makea", CG_MAKEA, 0.0)],
    },
    "mg.D": whole(
        "private", "NPB3.3-OMP MG/mg.f mg3P(): resid reads u, v and writes r, psinv reads r and writes u: 17 to 26 of 26 GiB"
    ),
    "bt.C": whole("private", "NPB3.3-OMP BT/adi.f: compute_rhs uses all fields, [xyz]_solve u, rhs, qs, rho_i, square (13/21)"),
    "sp.C": whole("private", "NPB3.3-OMP SP/adi.f: compute_rhs uses all fields, [xyz]_solve rhs, rho_i, speed, us to ws, lhs"),
    # In the sweeps thread t is about t planes of k behind the first (sync_left), so that at most 48 of 162 planes are in use, but
    # in four arrays, so the pages are not neighbours; rhs uses all. (Sweeps are parallel over j, but setbv and rhs over k: in
    # sweeps, most lines are in planes that other threads touched first.)
    "lu.C": whole("private", "NPB3.3-OMP LU/ssor.f: blts, buts sweep over k, in a pipeline, on u, rsd, qs, rho_i; rhs: all"),
    "ua.C": whole("private", "NPB3.3-OMP UA/ua.f, diffuse.f: 10 steps of conjugate gradient per time step use most fields"),
    # The tree of a view starts at the pool's first byte, so small views use its start only. How large the views are, weighted by
    # their work, was not worked out: plausible parts are 1 to 4.
    "dc.B": whole("private", "estimate: NPB3.3-OMP DC/rbt.c InitializeTree() empties a thread's pool for each view"),
    "ep.D": whole("private", "NPB3.3-OMP EP/ep.f: each batch of 2^16 pairs fills and reads the thread's array x"),
    # -- Metis.
    "kmeans": {
        "kind": "initialised-by-one",
        "parts": METIS_PARTS,
        "passes": float(KMEANS_ROUNDS),
        "source": "Metis app/kmeans.cc split(), lib/application.cc map_worker(); init_kmeans(): the main thread writes them all",
    },
    # Tasks are runs of pairs (i, j), j >= i. Threads are at different j, so all rows from i on are in use: on average two thirds,
    # and the last rows always. The rule does not apply; what is small is the matrix itself.
    "pca": whole(
        "initialised-by-one",
        "Metis app/pca.cc pca_cov: row i times all rows after it; main() writes the matrix. mib: estimate, a square matrix",
        mib=PCA_MATRIX * float(table_2()["pca"]["footprint_mb"]),
    ),
    # Map output, trees or hash tables of each thread, is used in a random order.
    "wc": {
        "kind": "initialised-by-one",
        "parts": METIS_PARTS,
        "passes": 1.0,
        "source": "Metis app/wc.cc, lib/defsplitter.hh split(), lib/application.cc map_worker(). The kind is an "
        "estimate: one process filled the page cache",
    },
    "wr": {
        "kind": "initialised-by-one",
        "parts": METIS_PARTS,
        "passes": 1.0,
        "source": "Metis app/wr.hh, lib/defsplitter.hh split(), lib/application.cc map_worker(). The kind is an "
        "estimate: one process filled the page cache",
    },
    "wrmem": {
        "kind": "initialised-by-one",
        "parts": METIS_PARTS,
        "passes": 1.0,
        "source": "Metis app/wrmem.cc main(): the main thread, on CPU 0, writes the input, by default 2 GiB; "
        "lib/defsplitter.hh split(), lib/application.cc map_worker()",
        "mib": 2048.0,
    },
    # -- The rest of Mosbench.
    "psearchy": whole("private", "Mosbench psearchy/mkdb/pedsort.C pass0(): a thread's words, postings, hash table fill up"),
    "memcached": whole("private", "Mosbench memcached/__init__.py: a process per core, items by hash"),
    # -- X-Stream.
    "belief": xstream("belief"),
    "bfs": xstream("bfs"),
    "cc": xstream("cc"),
    "pagerank": xstream("pagerank"),
    "sssp": xstream("sssp"),
    # -- Parsec.
    "bodytrack": whole("initialised-by-one", "estimate: Parsec bodytrack compares each particle with all four cameras' images"),
    "facesim": whole("initialised-by-one", "estimate: Parsec facesim solves over the whole mesh, a partition per thread"),
    # A frame rebuilds the grid from the other array, then makes six sweeps over one: in use (2 x 1 + 6 x 0.5) / 8, so 1.6 parts;
    # arrays swap once a frame, and the native input has 500 frames.
    "fluidanimate": {
        "kind": "private",
        "parts": 2,
        "passes": 250.0,
        "source": "Parsec fluidanimate pthreads.cpp AdvanceFrameMT(): swaps cells, cells2; six sweeps use cells only",
    },
    "streamcluster": whole(
        "initialised-by-one",
        "Parsec streamcluster.cpp streamCluster(): the main thread reads a chunk; pgain(): a slab of all points per thread",
        mib=200_000 * 128 * 4 / M,
    ),
    "swaptions": whole("private", "Parsec swaptions HJM_Securities.cpp worker(): each simulation uses the thread's small arrays"),
    "x264": whole("shared", "estimate: Parsec x264, 48 frames and their references are most of its pool of frames"),
    # -- Servers.
    "cassandra": whole("shared", "estimate: YCSB's keys are drawn by chance over all records"),
    "mongodb": whole("shared", "estimate: YCSB's keys are drawn by chance over all records"),
}


# ---- Heat ------------------------------------------------------------------------------------------------------------
#
# Caveats.
# (1) A profile counts accesses to the LLC, but pages' heat matters where memory answers. cg's 77 percent in 1 percent of pages
#     (4.2 MiB) are the vector p, 1.2 MB, which an LLC of 5 MiB keeps: the run's own miss ratio at 4 MiB is 0.23, so just these
#     accesses hit. heat_classes leaves such accesses out; cg's pages are then alike.
# (2) All threads use that vector: even without (1) it is no heat of the private region.
# (3) One thread was measured, on smaller inputs (ft.A, mg.B), and heat is that of a whole run: with a window it would count
#     differences in time twice. ft.A's hotter half is u1, which `arrays` above has.
# (4) Shares are over all pages of a program: use them only for a region that is nearly all of it.

HOTTEST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
BOUNDS = (0.01, 0.1, 0.5, 1.0)
# MiB of LLC of the machine that a run was measured for (data/machines).
LLC_MIB = {"amd48": 5.0, "r910": 24.0}
# Classes whose accesses per page differ by less than this factor are one.
ALIKE = 1.2


def hits(row, llc_mib):
    """Share of accesses that hit in an LLC, at the largest measured size that it has."""
    sizes = [0.25 * 2 ** (at / 2) for at in range(len(row["miss_ratios"]))]
    return 1 - row["miss_ratios"][max(at for at, size in enumerate(sizes) if size <= llc_mib)]


def heat_classes(row):
    """At most four (page_share, access_share), hottest first, each summing to 1; none if pages are alike. See the caveats."""
    if "heat" not in row:
        return []
    hottest, llc = BOUNDS[0], LLC_MIB[row["machine"]]
    reached = {bound: row["heat"][HOTTEST.index(bound)] if bound < 1 else 1.0 for bound in BOUNDS}
    cached = 0.0
    if hottest * row["pages"] * 4096 / M <= llc:
        # What the hottest pages have over their even share, as far as it hits.
        cached = min(max(reached[hottest] - hottest, 0.0) / (1 - hottest), hits(row, llc))
    classes, pages, accesses = [], 0.0, 0.0
    for bound in BOUNDS:
        upto = max((reached[bound] - cached) / (1 - cached), 0.0) if cached < 1 else bound
        classes.append((bound - pages, upto - accesses))
        pages, accesses = bound, upto
    merged = [classes[0]]
    for page_share, access_share in classes[1:]:
        before = merged[-1]
        if before[1] / before[0] < ALIKE * access_share / page_share:
            merged[-1] = before[0] + page_share, before[1] + access_share
        else:
            merged.append((page_share, access_share))
    if len(merged) == 1:
        return []
    rounded = [(round(page_share, 4), round(access_share, 4)) for page_share, access_share in merged]
    last = round(1 - sum(share for share, _ in rounded[:-1]), 4), round(1 - sum(share for _, share in rounded[:-1]), 4)
    return [*rounded[:-1], last]


# ---- Checks ----------------------------------------------------------------------------------------------------------


def check():
    import tomllib

    wrong, rows = [], table_2()
    wrong += [f"{name}: in one of the tables only" for name in set(rows) ^ set(WINDOWS)]
    for name, window in WINDOWS.items():
        if window["kind"] not in ("private", "shared", "initialised-by-one") or not window["source"]:
            wrong.append(f"{name}: the kind or the source is missing")
        if window["parts"] < 1 or window["passes"] * window["parts"] < 1 - 1e-9:
            wrong.append(f"{name}: {window['passes']} passes over {window['parts']} parts; at least one part must be used")
        if abs(sum(share for _, _, share in window.get("arrays", [("", 0, 1.0)])) - 1) > 1e-9:
            wrong.append(f"{name}: the arrays' shares do not add up to 1")
    for name, mib in DECLARED.items():
        published = float(rows[name]["footprint_mb"])
        print(f"{name:14} arrays {mib:8.0f} MiB, table 2 {published:8.0f}")
        if abs(mib / published - 1) > 0.05:
            wrong.append(f"{name}: arrays of {mib:.0f} MiB, but table 2 has {published:.0f}")
    for row in tomllib.loads((ROOT / "data/measured/profiles.toml").read_text())["program"]:
        classes = heat_classes(row)
        density = [access_share / page_share for page_share, access_share in classes]
        adds_up = all(abs(sum(column) - 1) < 1e-9 for column in zip(*classes))
        if not adds_up or density != sorted(density, reverse=True):
            wrong.append(f"{row['name']}: heat classes {classes} do not add up or are not in order")
        print(f"{row['name']:14} {classes or 'pages are alike'}")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    check()
