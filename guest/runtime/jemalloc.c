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
#include "entries.h"

enum { ARENAS_PER_NODE_MAX = 8 };

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

static struct region {
	extent_hooks hooks; /* first: jemalloc hands it back */
	struct stretch *stretch;
	unsigned arenas[ARENAS_PER_NODE_MAX];
	atomic_uint threads;
} regions[HOMENODE_TOPOLOGY_VNODES_MAX];

static unsigned arenas_per_node;
static homenode *topology;
static __thread __attribute__((tls_model("initial-exec"))) unsigned own_arena;

static struct {
	int (*mallctl)(const char *, void *, size_t *, void *, size_t);
	void (*dallocx)(void *, int);
	void *(*rallocx)(void *, size_t, int);
} jemalloc;

/* --- Extents --- */

static void *extent_alloc(extent_hooks *hooks, void *wanted, size_t bytes, size_t alignment, bool *zero, bool *commit, unsigned arena)
{
	void *begin;

	(void)arena;
	if (wanted)
		return NULL;
	begin = stretch_take(((struct region *)hooks)->stretch, bytes, alignment);
	*zero = true;
	*commit = true;
	return begin;
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

static bool is_elsewhere(const void *object)
{
	int node = stretch_of(object);

	return node >= 0 && (unsigned)node != own.node;
}

__attribute__((noinline)) static void look(void)
{
	own.left = LOOK_BYTES;
	if (stretches_bytes == 0)
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
		own_arena = arena;
		own.begin = stretches_begin + (uintptr_t)node * STRETCH;
	}
}

__attribute__((noinline)) static bool free_elsewhere(void *object)
{
	if (!is_elsewhere(object))
		return false;
	jemalloc.dallocx(object, WITHOUT_CACHE);
	return true;
}

__attribute__((noinline)) static bool realloc_elsewhere(void *object, size_t bytes, void **moved)
{
	if (bytes == 0 || !is_elsewhere(object) || own.node == NOWHERE)
		return false;
	*moved = jemalloc.rallocx(object, bytes, IN_ARENA(own_arena) | WITHOUT_CACHE);
	if (!*moved)
		errno = ENOMEM;
	return true;
}

/* The node whose memory an object is in, by its address; -1 if it is not from a node's arena. For tests and the curious. */
int homenode_jemalloc_node_of(const void *object);
EXPORT int homenode_jemalloc_node_of(const void *object)
{
	return stretch_of(object);
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
	const char *error = stretches_reserve(nodes);

	for (unsigned node = 0; !error && node < nodes; node++) {
		struct region *region = &regions[node];

		region->hooks = node_hooks;
		region->stretch = &stretches[node];
		for (unsigned at = 0; at < arenas_per_node; at++) {
			extent_hooks *hooks = &region->hooks;
			size_t size = sizeof(region->arenas[at]);

			if (jemalloc.mallctl("arenas.create", &region->arenas[at], &size, &hooks, sizeof(hooks)) != 0)
				return "jemalloc makes no arenas (its version is not 5?)";
		}
	}
	if (!error)
		stretches_follow(nodes);
	return error;
}

__attribute__((constructor)) static void begin(void)
{
	topology = open_before("jemalloc");
	if (!topology)
		return;
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
