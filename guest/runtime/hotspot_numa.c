/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libhomenode_hotspot_numa.so: what HotSpot knows as libnuma.so.1. It opens that name and looks symbols up in what it gets, so only
 * an object of that name (its SONAME) that is loaded already comes in between. For the JVM alone: it has what HotSpot calls.
 *
 * Tells HotSpot the virtual nodes and the table of hotspot.h. Without a topology page each call goes on to the real libnuma.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "hotspot.h"
#include "policy.h"
#include "say.h"

#define EXPORT __attribute__((visibility("default")))

struct bitmask {
	unsigned long size; /* bits */
	unsigned long *maskp;
};

enum { WORD_BITS = 8 * sizeof(unsigned long), MASK_WORDS = 2048 / WORD_BITS };

EXPORT const int homenode_hotspot_numa = 1;

static const struct homenode_hotspot *hotspot;
static void *real; /* libnuma, if it is passed through to */

static unsigned long all_words[MASK_WORDS], none_words[MASK_WORDS], bound_words[MASK_WORDS], dealt_words[MASK_WORDS];
static struct bitmask all = { 8 * sizeof(all_words), all_words };
static struct bitmask none = { 8 * sizeof(none_words), none_words };
static struct bitmask bound = { 8 * sizeof(bound_words), bound_words };
static struct bitmask dealt = { 8 * sizeof(dealt_words), dealt_words };

EXPORT unsigned long numa_all_nodes[MASK_WORDS];
EXPORT struct bitmask *numa_all_nodes_ptr = &all;
EXPORT struct bitmask *numa_nodes_ptr = &all;

/* A path, because the name alone is ours. */
static void open_real(void)
{
	static const char *const paths[] = {
		"/usr/lib/x86_64-linux-gnu/libnuma.so.1", "/usr/lib64/libnuma.so.1", "/lib64/libnuma.so.1", "/usr/lib/libnuma.so.1",
	};

	for (size_t at = 0; !real && at < sizeof(paths) / sizeof(*paths); at++)
		real = dlopen(paths[at], RTLD_LAZY | RTLD_LOCAL);
}

static void *real_symbol(const char *name, const char *version)
{
	void *symbol = real ? dlvsym(real, name, version) : NULL;

	return symbol || !real ? symbol : dlsym(real, name);
}

/* Calls the real one, if there is one. */
#define PASS(otherwise, version, name, type, ...)                                     \
	do {                                                                          \
		__typeof__(type) *function_ = real_symbol(name, version);             \
		return function_ ? function_(__VA_ARGS__) : (otherwise);              \
	} while (0)
#define PASS_NOTHING(version, name, type, ...)                                        \
	do {                                                                          \
		__typeof__(type) *function_ = real_symbol(name, version);             \
		if (function_)                                                        \
			function_(__VA_ARGS__);                                       \
	} while (0)

static int pass_available(void)
{
	PASS(-1, "libnuma_1.1", "numa_available", int(void), );
}

EXPORT int numa_available(void)
{
	const struct homenode_hotspot *(*begin)(void) =
		(const struct homenode_hotspot *(*)(void))dlsym(RTLD_DEFAULT, "homenode_hotspot_begin");

	if (begin)
		hotspot = begin();
	else
		say("libhomenode_hotspot.so is not preloaded (LD_PRELOAD needs both); the JVM runs as without");
	if (hotspot) {
		all_words[0] = hotspot->nodes == WORD_BITS ? ~0ul : (1ul << hotspot->nodes) - 1;
		numa_all_nodes[0] = all_words[0];
		return 0;
	}
	open_real();
	int available = pass_available();
	if (available != -1) {
		/* HotSpot reads these afterwards. */
		struct bitmask **all_nodes = real_symbol("numa_all_nodes_ptr", "libnuma_1.2");
		struct bitmask **nodes = real_symbol("numa_nodes_ptr", "libnuma_1.2");
		unsigned long *first = real_symbol("numa_all_nodes", "libnuma_1.1");

		if (all_nodes)
			numa_all_nodes_ptr = *all_nodes;
		if (nodes)
			numa_nodes_ptr = *nodes;
		if (first)
			memcpy(numa_all_nodes, first, 2048 / 8);
	}
	return available;
}

EXPORT int numa_max_node(void)
{
	if (hotspot)
		return (int)hotspot->nodes - 1;
	PASS(0, "libnuma_1.1", "numa_max_node", int(void), );
}

EXPORT int numa_num_configured_nodes(void)
{
	if (hotspot)
		return (int)hotspot->nodes;
	PASS(1, "libnuma_1.2", "numa_num_configured_nodes", int(void), );
}

static int node_to_cpus(int node, unsigned long *words, unsigned long bits)
{
	if (node < 0 || node >= (int)hotspot->nodes || bits < hotspot->cpus) {
		errno = ERANGE;
		return -1;
	}
	memset(words, 0, bits / 8);
	for (unsigned cpu = (unsigned)node; cpu < hotspot->cpus; cpu += hotspot->nodes)
		words[cpu / WORD_BITS] |= 1ul << cpu % WORD_BITS;
	return 0;
}

__asm__(".symver numa_node_to_cpus_v1,numa_node_to_cpus@libnuma_1.1");
EXPORT int numa_node_to_cpus_v1(int node, unsigned long *words, int bytes)
{
	if (hotspot)
		return node_to_cpus(node, words, 8 * (unsigned long)bytes);
	PASS(-1, "libnuma_1.1", "numa_node_to_cpus", int(int, unsigned long *, int), node, words, bytes);
}

__asm__(".symver numa_node_to_cpus_v2,numa_node_to_cpus@@libnuma_1.2");
EXPORT int numa_node_to_cpus_v2(int node, struct bitmask *cpus)
{
	if (hotspot)
		return node_to_cpus(node, cpus->maskp, cpus->size);
	PASS(-1, "libnuma_1.2", "numa_node_to_cpus", int(int, struct bitmask *), node, cpus);
}

/* Said once: a policy that the kernel refuses leaves memory where it is first touched. */
static void bind_memory(void *start, size_t bytes, int policy, unsigned long nodes)
{
	static atomic_flag said = ATOMIC_FLAG_INIT;

	if (homenode_mbind(start, bytes, policy, nodes) != 0 && !atomic_flag_test_and_set(&said))
		say("the kernel does not bind memory to nodes %#lx: %s; pages come from where they are first touched", nodes,
		    strerror(errno));
}

EXPORT void numa_tonode_memory(void *start, size_t bytes, int node)
{
	if (hotspot) {
		if (node >= 0 && node < (int)hotspot->nodes)
			bind_memory(start, bytes, MPOL_PREFERRED, 1ul << node);
		return;
	}
	PASS_NOTHING("libnuma_1.1", "numa_tonode_memory", void(void *, size_t, int), start, bytes, node);
}

__asm__(".symver numa_interleave_memory_v1,numa_interleave_memory@libnuma_1.1");
EXPORT void numa_interleave_memory_v1(void *start, size_t bytes, const unsigned long *nodes)
{
	if (hotspot) {
		bind_memory(start, bytes, MPOL_INTERLEAVE, nodes[0] & all_words[0]);
		return;
	}
	PASS_NOTHING("libnuma_1.1", "numa_interleave_memory", void(void *, size_t, const unsigned long *), start, bytes, nodes);
}

__asm__(".symver numa_interleave_memory_v2,numa_interleave_memory@@libnuma_1.2");
EXPORT void numa_interleave_memory_v2(void *start, size_t bytes, struct bitmask *nodes)
{
	if (hotspot) {
		bind_memory(start, bytes, MPOL_INTERLEAVE, nodes->maskp[0] & all_words[0]);
		return;
	}
	PASS_NOTHING("libnuma_1.2", "numa_interleave_memory", void(void *, size_t, struct bitmask *), start, bytes, nodes);
}

EXPORT void numa_set_bind_policy(int strict)
{
	/* Memory is preferred on a node, never bound to it: what does not fit goes elsewhere. */
	if (!hotspot)
		PASS_NOTHING("libnuma_1.1", "numa_set_bind_policy", void(int), strict);
}

EXPORT int numa_bitmask_isbitset(const struct bitmask *mask, unsigned int bit)
{
	return bit < mask->size && mask->maskp[bit / WORD_BITS] >> bit % WORD_BITS & 1;
}

EXPORT int numa_distance(int from, int to)
{
	if (hotspot) {
		int distance = from < 0 || to < 0 ? -1 : homenode_distance(hotspot->topology, (unsigned)from, (unsigned)to);

		/* libnuma's way to say that it does not know. */
		return distance < 0 ? 0 : distance;
	}
	PASS(0, "libnuma_1.1", "numa_distance", int(int, int), from, to);
}

/* The nodes of the process's own policy if it is this one. */
static bool own_policy(int wanted, unsigned long *words)
{
	int policy = 0;

	return syscall(SYS_get_mempolicy, &policy, words, 8ul * sizeof(all_words), NULL, 0) == 0 && policy == wanted;
}

EXPORT struct bitmask *numa_get_membind(void)
{
	if (hotspot)
		return own_policy(MPOL_BIND, bound_words) ? &bound : &all;
	PASS(&all, "libnuma_1.2", "numa_get_membind", struct bitmask *(void), );
}

EXPORT struct bitmask *numa_get_interleave_mask(void)
{
	if (hotspot)
		return own_policy(MPOL_INTERLEAVE, dealt_words) ? &dealt : &none;
	PASS(&none, "libnuma_1.2", "numa_get_interleave_mask", struct bitmask *(void), );
}

EXPORT int numa_move_pages(int process, unsigned long count, void **pages, const int *nodes, int *status, int flags)
{
	return (int)syscall(SYS_move_pages, process, count, pages, nodes, status, flags);
}

EXPORT void numa_set_preferred(int node)
{
	if (hotspot) {
		if (node >= 0 && node < (int)hotspot->nodes)
			homenode_set_policy(MPOL_PREFERRED, 1ul << node);
		return;
	}
	PASS_NOTHING("libnuma_1.1", "numa_set_preferred", void(int), node);
}
