/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stretch of address space for each virtual node, with that node's memory policy. An allocator that takes its memory from there
 * keeps nodes apart, and the address of an object shows its node.
 */
#ifndef HOMENODE_STRETCHES_H
#define HOMENODE_STRETCHES_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

#include "homenode.h"
#include "policy.h"
#include "say.h"

/* Of one node: more than its memory, since addresses are never given back. */
#define STRETCH_BITS 40
#define STRETCH ((uintptr_t)1 << STRETCH_BITS)

struct stretch {
	atomic_uintptr_t next, end;
};

static struct stretch stretches[HOMENODE_TOPOLOGY_VNODES_MAX];
/* All of the address space; no bytes as long as nothing is followed. */
static uintptr_t stretches_begin, stretches_bytes;

/* Takes addresses for good; NULL if the stretch has no more, or the kernel refuses. */
static void *stretch_take(struct stretch *stretch, size_t bytes, size_t alignment)
{
	uintptr_t begin, next = stretch->next;

	do {
		begin = (next + alignment - 1) & ~(alignment - 1);
		if (begin < next || bytes > stretch->end || begin > stretch->end - bytes)
			return NULL;
	} while (!atomic_compare_exchange_weak(&stretch->next, &next, begin + bytes));
	/* Not before: a program that locks its memory would lock all of the stretch. */
	return mprotect((void *)begin, bytes, PROT_READ | PROT_WRITE) == 0 ? (void *)begin : NULL;
}

/* Reserves the stretches. Returns what is wrong, or NULL. */
static const char *stretches_reserve(unsigned nodes)
{
	const size_t large_page = 2 << 20;
	unsigned refused = nodes;
	char *begin = mmap(NULL, nodes * STRETCH + large_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (begin == MAP_FAILED)
		return "no address space for a stretch per node (a limit of ulimit -v?)";
	begin = (char *)(((uintptr_t)begin + large_page - 1) & ~(large_page - 1));
	for (unsigned node = 0; node < nodes; node++) {
		struct stretch *stretch = &stretches[node];

		stretch->next = (uintptr_t)begin + node * STRETCH;
		stretch->end = (uintptr_t)begin + (node + 1) * STRETCH;
		if (homenode_mbind((void *)stretch->next, STRETCH, MPOL_PREFERRED, 1ul << node) != 0)
			refused = node;
	}
	if (refused < nodes)
		say("the kernel does not bind memory to node %u: %s; pages come from where they are first touched", refused,
		    strerror(errno));
	stretches_begin = (uintptr_t)begin;
	return NULL;
}

/* From now on threads look for their node. */
static void stretches_follow(unsigned nodes)
{
	__atomic_store_n(&stretches_bytes, nodes * STRETCH, __ATOMIC_RELEASE);
}

/* The node whose memory an object is in, by its address; -1 if it is in no stretch. */
static inline int stretch_of(const void *object)
{
	uintptr_t at = (uintptr_t)object - stretches_begin;

	return at < stretches_bytes ? (int)(at >> STRETCH_BITS) : -1;
}

#endif
