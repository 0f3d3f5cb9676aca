/* Times what Xen 4.7 does in software for a page that a guest writes: for an entry of PML's log, for a write fault, and to arm
 * the page again.
 *
 *     cc -O2 -o /tmp/xen-page-path scripts/profiles/xen-page-path.c && /tmp/xen-page-path
 *
 * Why: `data/experiments/page-logs/costs.toml` needs these, and no publication prints them. Xen's own code cannot be timed
 * here: it needs an Intel processor without another hypervisor below. This program takes the same steps in the same order on
 * tables of the same shape. It shares no code with Xen.
 *
 * The steps, read in Xen's source at the tag RELEASE-4.7.0:
 *
 * - Log (`vmx_vcpu_flush_pml_buffer`): for each of 512 entries, `p2m_change_type_one` and `paging_mark_gfn_dirty`.
 * - `p2m_change_type_one`: takes the p2m lock as a writer (a compare-and-exchange, a fence, a look at every CPU's reader), walks
 *   four levels to read the type (`ept_get_entry`), walks them for stale memory types (`resolve_misconfig`), walks them to write
 *   the entry (`ept_set_entry`), asks for the memory type (`epte_get_entry_emt`: two sets of ranges, each under a read lock), and
 *   releases the lock. The release calls a function on the CPUs that run the guest (`ept_sync_domain`, `on_selected_cpus`): on
 *   this one only, by a spin lock, a fence and an atomic clear.
 * - `paging_mark_gfn_dirty`: takes the paging lock, walks the levels of a bitmap, checks each frame number, and sets a bit.
 * - Fault (`hvm_hap_nested_page_fault`): asks the device models for the address (`hvm_mmio_internal`), takes the p2m lock, walks,
 *   finds the guest frame of the machine frame, marks it, changes its type as above under the same lock, and releases it.
 * - Arming (`p2m_change_entry_type_global`, `resolve_misconfig`): a clean makes the root's entries stale. The first access to
 *   each 2 MiB then exits, and the handler rewrites its 512 entries, asking for the memory type of each.
 *
 * Left out: exit and entry, the invalidation of translations and what the guest walks again, masking of interrupts, and misses of
 * code. Locks are free, as they are with one vCPU. The program runs over a guest of 1 GiB whose frames come in no order, in
 * groups of 512 that were just written, as a processor writes entries when it logs them. It prints nanoseconds per page, the
 * least of several passes, and the same without locked instructions and fences, which differ much between processors. */

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { FRAMES = 1 << 18, ENTRIES = 512, GROUP = 512, CPUS = 8, PASSES = 20 };
#define STEP __attribute__((noinline))
#define NO_FRAME UINT64_MAX

typedef uint64_t table[ENTRIES];

static table *tables, *nodes; /* of translations, and of the bitmap of written frames */
static uint64_t used_tables, used_nodes, bits[FRAMES / 64];
static uint64_t guest_frame_of[FRAMES], valid[FRAMES / 64 + 1];

/* ---- Locks ------------------------------------------------------------------------------------------------------------- */

struct lock {
    _Atomic uint32_t state;
    volatile int holder, depth;
};

static struct lock p2m, paging, calls, ranges;
static struct lock *volatile readers[CPUS][16]; /* one cache line per CPU */
static volatile _Atomic uint64_t selected[4], invalid[4];
static volatile int in_interrupt, flush_wanted;

static STEP void write_lock(struct lock *lock)
{
    if (lock->holder != 1) {
        uint32_t expected = 0;
        while (!atomic_compare_exchange_strong(&lock->state, &expected, 0xff))
            expected = 0;
        atomic_thread_fence(memory_order_seq_cst);
        for (int cpu = 0; cpu < CPUS; cpu++)
            while (readers[cpu][0] == lock)
                ;
        lock->holder = 1;
    }
    lock->depth++;
}

static void called(void *data) { (void)data; }

static STEP void call_on_selected(const volatile _Atomic uint64_t *mask, void (*function)(void *))
{
    int count = 0;
    atomic_fetch_add(&calls.state, 0x10000);
    for (int word = 0; word < 4; word++) {
        uint64_t bits_of = atomic_load_explicit(&mask[word], memory_order_relaxed);
        atomic_store_explicit(&selected[word], bits_of, memory_order_relaxed);
        count += __builtin_popcountll(bits_of);
    }
    if (count && (atomic_load_explicit(&selected[0], memory_order_relaxed) & 1)) {
        in_interrupt++;
        function(NULL);
        atomic_thread_fence(memory_order_seq_cst);
        atomic_fetch_and(&selected[0], ~1ull);
        in_interrupt--;
    }
    while (selected[0] | selected[1] | selected[2] | selected[3])
        ;
    atomic_store_explicit(&calls.state, 0, memory_order_release);
}

static const volatile _Atomic uint64_t runs_on[4] = { 1 };

static STEP void write_unlock(struct lock *lock)
{
    if (--lock->depth)
        return;
    lock->holder = -1;
    atomic_fetch_sub(&lock->state, 0xff);
    if (flush_wanted) {
        flush_wanted = 0;
        call_on_selected(runs_on, called);
    }
}

static STEP void spin_lock_again(struct lock *lock)
{
    if (lock->holder != 1) {
        atomic_fetch_add(&lock->state, 0x10000);
        lock->holder = 1;
    }
    lock->depth++;
}

static STEP void spin_unlock_again(struct lock *lock)
{
    if (--lock->depth)
        return;
    lock->holder = -1;
    atomic_store_explicit(&lock->state, 0, memory_order_release);
}

/* ---- Translations ------------------------------------------------------------------------------------------------------ */

/* An entry: present and rights in bits 0 to 2, memory type in 3 to 5, large in 7, kind of page in 8 to 11, frame from 12 on. */
#define FRAME(entry) ((entry) >> 12)
#define TYPE(entry) ((entry) >> 3 & 7)
#define KIND(entry) ((entry) >> 8 & 15)
enum { WRITABLE = 1, LOGGED = 2, STALE = 7 };

static STEP int is_valid(uint64_t frame)
{
    return frame < FRAMES && (valid[frame / 64] >> (frame % 64) & 1);
}

static STEP int descend(table **at, uint64_t *rest, int level)
{
    uint64_t entry = *(volatile uint64_t *)&(**at)[*rest >> (9 * level)];
    if (!(entry & 7))
        return 0;
    if (entry & 0x80)
        return 2;
    *at = &tables[FRAME(entry)];
    *rest &= (1ull << (9 * level)) - 1;
    return 1;
}

static STEP uint64_t look_up(uint64_t frame, int *kind)
{
    table *at = &tables[0];
    uint64_t rest = frame;
    for (int level = 3; level; level--)
        if (descend(&at, &rest, level) != 1)
            return NO_FRAME;
    uint64_t entry = (*at)[rest];
    *kind = KIND(entry);
    return (entry & 7) ? FRAME(entry) : NO_FRAME;
}

static STEP int settle_types(uint64_t frame)
{
    uint64_t next = 0;
    for (int level = 3;; level--) {
        uint64_t entry = *(volatile uint64_t *)&tables[next][frame >> (9 * level) & 511];
        if (level == 0 || (entry & 0x80))
            return TYPE(entry) == STALE;
        if (TYPE(entry) == STALE || !(entry & 7))
            return 1;
        next = FRAME(entry);
    }
}

static uint64_t device_ranges[8][2];

static STEP int in_ranges(uint64_t first, uint64_t last)
{
    int found = 0;
    atomic_fetch_add(&ranges.state, 0x100);
    for (int range = 0; range < 4 && device_ranges[range][0] <= last; range++)
        found |= device_ranges[range][1] >= first;
    atomic_fetch_sub(&ranges.state, 0x100);
    return found;
}

static STEP int memory_type(uint64_t frame)
{
    if (!is_valid(frame) || in_ranges(frame, frame))
        return 0;
    if (in_ranges(frame, frame))
        return -1;
    return 6;
}

static STEP uint64_t rights(int kind)
{
    switch (kind) {
    case WRITABLE: return 7;
    case LOGGED: return 5;
    default: return 0;
    }
}

static STEP int set_entry(uint64_t frame, uint64_t machine, int kind)
{
    if (settle_types(frame))
        return -1;
    table *at = &tables[0];
    uint64_t rest = frame;
    for (int level = 3; level; level--)
        if (descend(&at, &rest, level) != 1)
            return -1;
    volatile uint64_t *entry = &(*at)[rest];
    int present = (*entry & 7) != 0;
    uint64_t fresh = 0;
    if (is_valid(machine))
        fresh = machine << 12 | (uint64_t)kind << 8 | (uint64_t)memory_type(machine) << 3 | rights(kind);
    *entry = fresh;
    if (present) {
        for (int word = 0; word < 4; word++)
            atomic_store_explicit(&invalid[word], UINT64_MAX, memory_order_relaxed);
        flush_wanted = 1;
    }
    return 0;
}

static STEP int change_type(uint64_t frame, int from, int to)
{
    int kind = 0, result = -1;
    write_lock(&p2m);
    uint64_t machine = look_up(frame, &kind);
    if (kind == from)
        result = set_entry(frame, machine, to);
    write_unlock(&p2m);
    return result;
}

/* ---- The log of written frames, and the two paths ---------------------------------------------------------------------- */

static STEP void mark(uint64_t frame)
{
    spin_lock_again(&paging);
    uint64_t node = 0;
    for (int level = 2; level >= 0; level--) {
        if (!is_valid(node))
            abort();
        node = *(volatile uint64_t *)&nodes[node][frame >> (15 + 9 * level) & 511];
    }
    if (is_valid(node))
        bits[frame / 64] |= 1ull << (frame % 64);
    spin_unlock_again(&paging);
}

static void from_log(uint64_t frame)
{
    change_type(frame, LOGGED, WRITABLE);
    mark(frame);
}

static STEP int accepts(uint64_t address, int device) { return address == 0xfee00000 + (uint64_t)device * 4096; }

static int (*volatile accept_of[6])(uint64_t, int) = { accepts, accepts, accepts, accepts, accepts, accepts };

static void fault(uint64_t frame)
{
    int kind = 0;
    for (int device = 0; device < 6; device++)
        if (accept_of[device](frame << 12, device))
            return;
    write_lock(&p2m);
    uint64_t machine = look_up(frame, &kind);
    mark(*(volatile uint64_t *)&guest_frame_of[machine]);
    change_type(frame, LOGGED, WRITABLE);
    write_unlock(&p2m);
}

static STEP void arm(uint64_t frame)
{
    table *at = &tables[0];
    uint64_t rest = frame;
    for (int level = 3; level; level--)
        if (descend(&at, &rest, level) != 1)
            return;
    for (int entry = 0; entry < ENTRIES; entry++) {
        uint64_t old = *(volatile uint64_t *)&(*at)[entry];
        if (!(old & 7))
            continue;
        uint64_t type = (uint64_t)memory_type(FRAME(old));
        *(volatile uint64_t *)&(*at)[entry] = FRAME(old) << 12 | LOGGED << 8 | type << 3 | rights(LOGGED);
    }
}

/* ---- Set-up and timing ------------------------------------------------------------------------------------------------- */

static volatile uint64_t *leaf(uint64_t frame)
{
    table *at = &tables[0];
    uint64_t rest = frame;
    for (int level = 3; level; level--)
        descend(&at, &rest, level);
    return &(*at)[rest];
}

static void build(void)
{
    tables = calloc(600, sizeof(table));
    nodes = calloc(64, sizeof(table));
    if (!tables || !nodes)
        abort();
    for (int frame = 0; frame < FRAMES; frame++) {
        valid[frame / 64] |= 1ull << (frame % 64);
        guest_frame_of[frame] = (uint64_t)frame;
    }
    for (int range = 0; range < 8; range++)
        device_ranges[range][0] = device_ranges[range][1] = FRAMES + (uint64_t)range;
    used_tables = used_nodes = 1;
    for (uint64_t frame = 0; frame < FRAMES; frame++) {
        uint64_t at = 0;
        for (int level = 3; level; level--) {
            uint64_t *entry = &tables[at][frame >> (9 * level) & 511];
            if (!*entry)
                *entry = used_tables++ << 12 | 7;
            at = FRAME(*entry);
        }
        tables[at][frame & 511] = frame << 12 | LOGGED << 8 | 6 << 3 | 5;
        for (int level = 2, node = 0; level >= 0; level--) {
            uint64_t *entry = &nodes[node][frame >> (15 + 9 * level) & 511];
            if (!*entry)
                *entry = used_nodes++;
            node = (int)*entry;
        }
    }
}

static double now_ns(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return 1e9 * (double)at.tv_sec + (double)at.tv_nsec;
}

static double time_of(void (*path)(uint64_t))
{
    double best = 1e18;
    for (int pass = 0; pass < PASSES; pass++) {
        double spent = 0;
        for (uint64_t group = 0; group < FRAMES; group += GROUP) {
            uint64_t frames[GROUP];
            for (int at = 0; at < GROUP; at++) {
                frames[at] = (group + (uint64_t)at) * 40503 % FRAMES;
                volatile uint64_t *entry = leaf(frames[at]);
                *entry = (*entry & ~0xf07ull) | LOGGED << 8 | 5;
            }
            double began = now_ns();
            for (int at = 0; at < GROUP; at++)
                path(frames[at]);
            spent += now_ns() - began;
        }
        if (spent < best)
            best = spent;
    }
    return best / FRAMES;
}

static double time_of_arming(void)
{
    double best = 1e18;
    for (int pass = 0; pass < PASSES; pass++) {
        double began = now_ns();
        for (uint64_t frame = 0; frame < FRAMES; frame += ENTRIES)
            arm(frame);
        double spent = now_ns() - began;
        if (spent < best)
            best = spent;
    }
    return best / FRAMES;
}

static double time_of_a_lock(void)
{
    static _Atomic uint32_t state;
    double best = 1e18;
    for (int pass = 0; pass < PASSES; pass++) {
        double began = now_ns();
        for (int time = 0; time < 1000000; time++)
            atomic_fetch_add(&state, 1);
        double spent = now_ns() - began;
        if (spent < best)
            best = spent;
    }
    return best / 1e6;
}

static void print(const char *what, double ns, int locked, int fences, double lock_ns)
{
    /* The compiler makes a fence of a locked instruction too. */
    double rest = ns - (locked + fences) * lock_ns;
    printf("%-8s %4.0f ns; %d locked instructions and %d fences, the rest %.0f ns\n", what, ns, locked, fences, rest);
}

int main(void)
{
    build();
    double lock_ns = time_of_a_lock();
    printf("a locked instruction takes %.1f ns\n", lock_ns);
    /* Locked: p2m lock taken and released, two sets of ranges (2 each), call lock, atomic clear, paging lock. */
    print("log", time_of(from_log), 9, 2, lock_ns);
    print("fault", time_of(fault), 9, 2, lock_ns);
    print("arming", time_of_arming(), 4, 0, lock_ns);
    return 0;
}
