/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libhomenode_jemalloc.so: an unmodified jemalloc gives each thread memory of the node that it is on now. Preloaded before jemalloc:
 *
 *     LD_PRELOAD=libhomenode_jemalloc.so:libjemalloc.so.2
 *
 * Each node has a stretch of address space with a memory policy, and arenas of jemalloc's that take their extents from there alone.
 * Where an object's memory is can so be seen from its address. A thread that finds itself on another node changes to an arena of that
 * node and empties its cache; it looks once in LOOK_BYTES that it allocates, so at each large object. An object of another node goes back to
 * the arena that it is from, and not into the cache of who frees it, from which it would be handed out again.
 *
 * Without a topology page, or without jemalloc behind it, each call goes on to the next allocator and nothing else happens.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "homenode.h"
#include "policy.h"
#include "say.h"

#define EXPORT __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

enum {
	LOOK_BYTES = 32 << 10,
	REGION_BITS = 40, /* of a node's stretch: more than its memory, since addresses are never given back */
	ARENAS_PER_NODE_MAX = 8,
	NOWHERE = 0xff,
};

/* As in jemalloc's header, which a guest need not have. */
#define WITHOUT_CACHE 0x100
#define IN_ARENA(arena) ((int)(((arena) + 1) << 20))
typedef struct extent_hooks extent_hooks;
struct extent_hooks {
	void *(*alloc)(extent_hooks *, void *, size_t, size_t, bool *, bool *, unsigned);
	bool (*dalloc)(extent_hooks *, void *, size_t, bool, unsigned);
	void (*destroy)(extent_hooks *, void *, size_t, bool, unsigned);
	bool (*commit)(extent_hooks *, void *, size_t, size_t, size_t, unsigned);
	bool (*decommit)(extent_hooks *, void *, size_t, size_t, size_t, unsigned);
	bool (*purge_lazy)(extent_hooks *, void *, size_t, size_t, size_t, unsigned);
	bool (*purge_forced)(extent_hooks *, void *, size_t, size_t, size_t, unsigned);
	bool (*split)(extent_hooks *, void *, size_t, size_t, size_t, bool, unsigned);
	bool (*merge)(extent_hooks *, void *, size_t, void *, size_t, bool, unsigned);
};

struct region {
	extent_hooks hooks; /* first: jemalloc hands it back */
	atomic_uintptr_t next, end;
	unsigned arenas[ARENAS_PER_NODE_MAX];
	atomic_uint threads;
};

#define STRETCH ((uintptr_t)1 << REGION_BITS)

static struct region regions[HOMENODE_TOPOLOGY_VNODES_MAX];
/* All of the address space; no bytes as long as nothing is followed. */
static uintptr_t regions_begin, regions_bytes;
static unsigned arenas_per_node;
static homenode *topology;

static struct {
	int (*mallctl)(const char *, void *, size_t *, void *, size_t);
	void (*dallocx)(void *, int);
	void *(*rallocx)(void *, size_t, int);
} jemalloc;

/* What a thread knows of itself. */
static __thread __attribute__((tls_model("initial-exec"))) struct {
	size_t left;     /* bytes until it looks again */
	uintptr_t begin; /* of its node's stretch */
	unsigned node, arena;
} own = { .node = NOWHERE };

/* --- Extents --- */

static void *extent_alloc(extent_hooks *hooks, void *wanted, size_t bytes, size_t alignment, bool *zero, bool *commit, unsigned arena)
{
	struct region *region = (struct region *)hooks;
	uintptr_t begin, next = region->next;

	(void)arena;
	if (wanted)
		return NULL;
	do {
		begin = (next + alignment - 1) & ~(alignment - 1);
		if (begin < next || bytes > region->end || begin > region->end - bytes)
			return NULL;
	} while (!atomic_compare_exchange_weak(&region->next, &next, begin + bytes));
	/* Not before: a program that locks its memory would lock all of the stretch. */
	if (mprotect((void *)begin, bytes, PROT_READ | PROT_WRITE) != 0)
		return NULL;
	*zero = true;
	*commit = true;
	return (void *)begin;
}

/* Kept for jemalloc to use again. */
static bool extent_dalloc(extent_hooks *hooks, void *extent, size_t bytes, bool committed, unsigned arena)
{
	(void)hooks, (void)extent, (void)bytes, (void)committed, (void)arena;
	return true;
}

static bool extent_purge_lazy(extent_hooks *hooks, void *extent, size_t bytes, size_t offset, size_t length, unsigned arena)
{
	(void)hooks, (void)bytes, (void)arena;
	return madvise((char *)extent + offset, length, MADV_FREE) != 0;
}

static bool extent_purge_forced(extent_hooks *hooks, void *extent, size_t bytes, size_t offset, size_t length, unsigned arena)
{
	(void)hooks, (void)bytes, (void)arena;
	return madvise((char *)extent + offset, length, MADV_DONTNEED) != 0;
}

static bool extent_split(extent_hooks *hooks, void *extent, size_t bytes, size_t first, size_t second, bool committed, unsigned arena)
{
	(void)hooks, (void)extent, (void)bytes, (void)first, (void)second, (void)committed, (void)arena;
	return false;
}

static bool extent_merge(extent_hooks *hooks, void *first, size_t first_bytes, void *second, size_t second_bytes, bool committed,
			 unsigned arena)
{
	(void)hooks, (void)first, (void)first_bytes, (void)second, (void)second_bytes, (void)committed, (void)arena;
	return false;
}

static const extent_hooks node_hooks = {
	.alloc = extent_alloc,
	.dalloc = extent_dalloc,
	.purge_lazy = extent_purge_lazy,
	.purge_forced = extent_purge_forced,
	.split = extent_split,
	.merge = extent_merge,
};

/* --- Threads --- */

/* The usual case, in as little as possible: of the thread's own node. */
static inline bool is_own(const void *object)
{
	return (uintptr_t)object - own.begin < STRETCH;
}

static bool is_elsewhere(const void *object)
{
	uintptr_t at = (uintptr_t)object - regions_begin;

	return at < regions_bytes && at >> REGION_BITS != own.node;
}

__attribute__((noinline)) static void look(void)
{
	/* Before anything that could allocate. */
	own.left = LOOK_BYTES;
	if (regions_bytes == 0)
		return;
	int node = homenode_node(topology);
	if (node < 0 || (unsigned)node == own.node)
		return;
	struct region *region = &regions[node];
	unsigned arena = region->arenas[atomic_fetch_add(&region->threads, 1) % arenas_per_node];

	/* What it has kept for itself goes back to where it is from. */
	jemalloc.mallctl("thread.tcache.flush", NULL, NULL, NULL, 0);
	if (jemalloc.mallctl("thread.arena", NULL, NULL, &arena, sizeof(arena)) == 0) {
		own.node = (unsigned)node;
		own.arena = arena;
		own.begin = regions_begin + (uintptr_t)node * STRETCH;
	}
}

#define LOOK(bytes)                             \
	do {                                    \
		if (UNLIKELY((bytes) >= own.left)) \
			look();                 \
		else                            \
			own.left -= (bytes);    \
	} while (0)

/* Frees an object of another node; false if it is of none, so that the next allocator has to. */
__attribute__((noinline)) static bool free_elsewhere(void *object)
{
	if (!is_elsewhere(object))
		return false;
	jemalloc.dallocx(object, WITHOUT_CACHE);
	return true;
}

/* --- Entry points --- */

static void *first_malloc(size_t bytes);
static void first_free(void *object);
static void *first_calloc(size_t count, size_t bytes);
static void *first_realloc(void *object, size_t bytes);
static void *first_aligned_alloc(size_t alignment, size_t bytes);
static int first_posix_memalign(void **object, size_t alignment, size_t bytes);
static void *first_memalign(size_t alignment, size_t bytes);
static void *first_valloc(size_t bytes);
static void *first_pvalloc(size_t bytes);

/* Those of the next allocator; found when one is called, which may be before the constructor. */
static struct {
	void *(*malloc)(size_t);
	void (*free)(void *);
	void *(*calloc)(size_t, size_t);
	void *(*realloc)(void *, size_t);
	void *(*aligned_alloc)(size_t, size_t);
	int (*posix_memalign)(void **, size_t, size_t);
	void *(*memalign)(size_t, size_t);
	void *(*valloc)(size_t);
	void *(*pvalloc)(size_t);
} next = {
	first_malloc,	      first_free,     first_calloc, first_realloc, first_aligned_alloc,
	first_posix_memalign, first_memalign, first_valloc, first_pvalloc,
};

__attribute__((noinline)) static void find_next(void)
{
	/* Looking for what is not there allocates: what all have comes first. */
#define FIND(name) next.name = (__typeof__(next.name))dlsym(RTLD_NEXT, #name)
	FIND(calloc);
	FIND(realloc);
	FIND(free);
	FIND(aligned_alloc);
	FIND(posix_memalign);
	FIND(memalign);
	FIND(valloc);
	FIND(pvalloc);
	FIND(malloc);
#undef FIND
}

#define FIRST(type, name, parameters, ...)       \
	static type first_##name parameters      \
	{                                        \
		find_next();                     \
		return next.name(__VA_ARGS__);   \
	}
FIRST(void *, malloc, (size_t bytes), bytes)
FIRST(void, free, (void *object), object)
FIRST(void *, calloc, (size_t count, size_t bytes), count, bytes)
FIRST(void *, realloc, (void *object, size_t bytes), object, bytes)
FIRST(void *, aligned_alloc, (size_t alignment, size_t bytes), alignment, bytes)
FIRST(int, posix_memalign, (void **object, size_t alignment, size_t bytes), object, alignment, bytes)
FIRST(void *, memalign, (size_t alignment, size_t bytes), alignment, bytes)
FIRST(void *, valloc, (size_t bytes), bytes)
FIRST(void *, pvalloc, (size_t bytes), bytes)

EXPORT void *malloc(size_t bytes)
{
	LOOK(bytes);
	return next.malloc(bytes);
}

EXPORT void free(void *object)
{
	if (UNLIKELY(!is_own(object) && free_elsewhere(object)))
		return;
	next.free(object);
}

EXPORT void *calloc(size_t count, size_t bytes)
{
	/* Whether it is large only matters when it does not overflow. */
	LOOK(count * bytes);
	return next.calloc(count, bytes);
}

EXPORT void *realloc(void *object, size_t bytes)
{
	LOOK(bytes);
	if (UNLIKELY(!is_own(object) && bytes > 0 && is_elsewhere(object) && own.node != NOWHERE)) {
		void *moved = jemalloc.rallocx(object, bytes, IN_ARENA(own.arena) | WITHOUT_CACHE);

		if (!moved)
			errno = ENOMEM;
		return moved;
	}
	return next.realloc(object, bytes);
}

EXPORT void *aligned_alloc(size_t alignment, size_t bytes)
{
	LOOK(bytes);
	return next.aligned_alloc(alignment, bytes);
}

EXPORT int posix_memalign(void **object, size_t alignment, size_t bytes)
{
	LOOK(bytes);
	return next.posix_memalign(object, alignment, bytes);
}

EXPORT void *memalign(size_t alignment, size_t bytes)
{
	LOOK(bytes);
	return next.memalign(alignment, bytes);
}

EXPORT void *valloc(size_t bytes)
{
	LOOK(bytes);
	return next.valloc(bytes);
}

EXPORT void *pvalloc(size_t bytes)
{
	LOOK(bytes);
	return next.pvalloc(bytes);
}

/* C++: jemalloc has operators of its own, which do not call malloc. By their mangled names; nobody calls them where there are none. */
#define OPERATOR(name) (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define NEW(name, parameters, ...)                                       \
	void *name parameters;                                           \
	EXPORT void *name parameters                                     \
	{                                                                \
		static __typeof__(name) *operator_;                      \
		if (UNLIKELY(!operator_))                                \
			operator_ = OPERATOR(name);                      \
		LOOK(bytes);                                             \
		return operator_(__VA_ARGS__);                           \
	}
#define DELETE(name, parameters, ...)                                    \
	void name parameters;                                            \
	EXPORT void name parameters                                      \
	{                                                                \
		static __typeof__(name) *operator_;                      \
		if (UNLIKELY(!is_own(object) && free_elsewhere(object))) \
			return;                                          \
		if (UNLIKELY(!operator_))                                \
			operator_ = OPERATOR(name);                      \
		operator_(__VA_ARGS__);                                  \
	}
NEW(_Znwm, (size_t bytes), bytes)
NEW(_Znam, (size_t bytes), bytes)
NEW(_ZnwmRKSt9nothrow_t, (size_t bytes, const void *nothrow), bytes, nothrow)
NEW(_ZnamRKSt9nothrow_t, (size_t bytes, const void *nothrow), bytes, nothrow)
NEW(_ZnwmSt11align_val_t, (size_t bytes, size_t alignment), bytes, alignment)
NEW(_ZnamSt11align_val_t, (size_t bytes, size_t alignment), bytes, alignment)
NEW(_ZnwmSt11align_val_tRKSt9nothrow_t, (size_t bytes, size_t alignment, const void *nothrow), bytes, alignment, nothrow)
NEW(_ZnamSt11align_val_tRKSt9nothrow_t, (size_t bytes, size_t alignment, const void *nothrow), bytes, alignment, nothrow)
DELETE(_ZdlPv, (void *object), object)
DELETE(_ZdaPv, (void *object), object)
DELETE(_ZdlPvm, (void *object, size_t bytes), object, bytes)
DELETE(_ZdaPvm, (void *object, size_t bytes), object, bytes)
DELETE(_ZdlPvRKSt9nothrow_t, (void *object, const void *nothrow), object, nothrow)
DELETE(_ZdaPvRKSt9nothrow_t, (void *object, const void *nothrow), object, nothrow)
DELETE(_ZdlPvSt11align_val_t, (void *object, size_t alignment), object, alignment)
DELETE(_ZdaPvSt11align_val_t, (void *object, size_t alignment), object, alignment)
DELETE(_ZdlPvmSt11align_val_t, (void *object, size_t bytes, size_t alignment), object, bytes, alignment)
DELETE(_ZdaPvmSt11align_val_t, (void *object, size_t bytes, size_t alignment), object, bytes, alignment)
DELETE(_ZdlPvSt11align_val_tRKSt9nothrow_t, (void *object, size_t alignment, const void *nothrow), object, alignment, nothrow)
DELETE(_ZdaPvSt11align_val_tRKSt9nothrow_t, (void *object, size_t alignment, const void *nothrow), object, alignment, nothrow)

/* The node whose memory an object is in, by its address; -1 if it is not from a node's arena. For tests and the curious. */
int homenode_jemalloc_node_of(const void *object);
EXPORT int homenode_jemalloc_node_of(const void *object)
{
	uintptr_t at = (uintptr_t)object - regions_begin;

	return at < regions_bytes ? (int)(at >> REGION_BITS) : -1;
}

/* --- Beginning --- */

/* Whether what comes next is jemalloc, and all of it. */
static bool find_jemalloc(void)
{
	Dl_info allocator, controls;

	jemalloc.mallctl = (__typeof__(jemalloc.mallctl))dlsym(RTLD_NEXT, "mallctl");
	jemalloc.dallocx = (__typeof__(jemalloc.dallocx))dlsym(RTLD_NEXT, "dallocx");
	jemalloc.rallocx = (__typeof__(jemalloc.rallocx))dlsym(RTLD_NEXT, "rallocx");
	return jemalloc.mallctl && jemalloc.dallocx && jemalloc.rallocx && dladdr((void *)next.malloc, &allocator) &&
	       dladdr((void *)jemalloc.mallctl, &controls) && allocator.dli_fbase == controls.dli_fbase;
}

/* A stretch for each node, with its arenas. */
static const char *lay_out(unsigned nodes)
{
	const size_t large_page = 2 << 20;
	unsigned refused = nodes;
	char *begin = mmap(NULL, nodes * STRETCH + large_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (begin == MAP_FAILED)
		return "no address space for arenas (a limit of ulimit -v?)";
	begin = (char *)(((uintptr_t)begin + large_page - 1) & ~(large_page - 1));
	for (unsigned node = 0; node < nodes; node++) {
		struct region *region = &regions[node];

		region->hooks = node_hooks;
		region->next = (uintptr_t)begin + node * STRETCH;
		region->end = (uintptr_t)begin + (node + 1) * STRETCH;
		if (homenode_mbind((void *)region->next, STRETCH, MPOL_PREFERRED, 1ul << node) != 0)
			refused = node;
		for (unsigned at = 0; at < arenas_per_node; at++) {
			extent_hooks *hooks = &region->hooks;
			size_t size = sizeof(region->arenas[at]);

			if (jemalloc.mallctl("arenas.create", &region->arenas[at], &size, &hooks, sizeof(hooks)) != 0)
				return "jemalloc makes no arenas (its version is not 5?)";
		}
	}
	if (refused < nodes)
		say("the kernel does not bind memory to node %u: %s; pages come from where they are first touched", refused,
		    strerror(errno));
	regions_begin = (uintptr_t)begin;
	/* From now on threads look. */
	__atomic_store_n(&regions_bytes, nodes * STRETCH, __ATOMIC_RELEASE);
	return NULL;
}

__attribute__((constructor)) static void begin(void)
{
	char why[HOMENODE_ERROR_BYTES];

	find_next();
	topology = homenode_open(NULL, why);
	if (!topology) {
		say("%s; jemalloc runs as without", why);
		return;
	}
	if (!find_jemalloc()) {
		say("jemalloc is not what comes next (put libjemalloc.so.2 behind libhomenode_jemalloc.so in LD_PRELOAD); "
		    "the program runs as without");
		return;
	}
	unsigned nodes = homenode_nodes(topology), share = homenode_vcpus(topology) / nodes;

	arenas_per_node = share < 1 ? 1 : share < ARENAS_PER_NODE_MAX ? share : ARENAS_PER_NODE_MAX;
	const char *error = lay_out(nodes);
	if (error)
		say("%s; jemalloc runs as without", error);
	own.left = 0;
}
