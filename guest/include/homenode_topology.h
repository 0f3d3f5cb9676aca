/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * The topology page: where the vCPUs and the memory of a virtual machine are on its host, now.
 *
 * One writer, any number of readers. The host writes the page that a VM sees as the memory of a device; the guest's kernel module
 * writes the copy that programs see as /dev/homenode-topology, in the guest's own numbers and with vcpu_vnode[] filled in.
 * Whoever reads takes nothing on trust: homenode_topology_read() hands out only what it has found whole and in bounds.
 *
 * x86-64: little-endian, and a 64-bit load is one load. For kernel and user space, C11 and C++11. The Rust side of it is the
 * crate homenode-topology-page; its tests hold both to the same bytes and the same verdicts.
 */
#ifndef HOMENODE_TOPOLOGY_H
#define HOMENODE_TOPOLOGY_H

#include <linux/types.h>

/* "HNTOPOLO", read as a little-endian word. */
#define HOMENODE_TOPOLOGY_MAGIC 0x4f4c4f504f544e48ull
#define HOMENODE_TOPOLOGY_LAYOUT 1u
/* Bytes to map: whole pages. What follows the structure is reserved. */
#define HOMENODE_TOPOLOGY_BYTES 8192u

#define HOMENODE_TOPOLOGY_VCPUS_MAX 1024u
#define HOMENODE_TOPOLOGY_VNODES_MAX 64u
#define HOMENODE_TOPOLOGY_PNODES_MAX 64u
/* In place of a node: not known, or no memory, or left to the reader. */
#define HOMENODE_TOPOLOGY_NONE 0xffu
/* The distance of a node to itself, and the least of any, as in ACPI's SLIT. */
#define HOMENODE_TOPOLOGY_LOCAL 10u
/* A writer needs less than a microsecond; who finds the page being written this often in a row stops waiting for it. */
#define HOMENODE_TOPOLOGY_TRIES 1000

struct homenode_topology {
	__u64 magic;
	__u32 layout;
	__u32 size;        /* of this structure, bytes */
	__u64 sequence;    /* the version: odd while the page is written; compare for equality only, it may wrap */
	__u32 vcpu_count;  /* 1 to VCPUS_MAX */
	__u16 vnode_count; /* 1 to VNODES_MAX */
	__u16 pnode_count; /* 1 to PNODES_MAX */
	__u64 reserved[4];
	__u8 vcpu_pnode[HOMENODE_TOPOLOGY_VCPUS_MAX];   /* the host's node on which a vCPU runs, or NONE */
	__u8 vcpu_vnode[HOMENODE_TOPOLOGY_VCPUS_MAX];   /* the virtual node that a vCPU now belongs to, or NONE: derive it */
	__u8 vnode_pnode[HOMENODE_TOPOLOGY_VNODES_MAX]; /* the host's node that has the memory of a virtual node, or NONE */
	__u8 distance[HOMENODE_TOPOLOGY_PNODES_MAX][HOMENODE_TOPOLOGY_PNODES_MAX]; /* from, to: of the host's nodes */
};

#ifdef __cplusplus
#define HOMENODE_STATIC_ASSERT static_assert
#else
#define HOMENODE_STATIC_ASSERT _Static_assert
#endif
#define HOMENODE_AT(field, offset) \
	HOMENODE_STATIC_ASSERT(__builtin_offsetof(struct homenode_topology, field) == (offset), #field)
HOMENODE_AT(magic, 0);
HOMENODE_AT(layout, 8);
HOMENODE_AT(size, 12);
HOMENODE_AT(sequence, 16);
HOMENODE_AT(vcpu_count, 24);
HOMENODE_AT(vnode_count, 28);
HOMENODE_AT(pnode_count, 30);
HOMENODE_AT(reserved, 32);
HOMENODE_AT(vcpu_pnode, 64);
HOMENODE_AT(vcpu_vnode, 1088);
HOMENODE_AT(vnode_pnode, 2112);
HOMENODE_AT(distance, 2176);
HOMENODE_STATIC_ASSERT(sizeof(struct homenode_topology) == 6272, "size");
HOMENODE_STATIC_ASSERT(sizeof(struct homenode_topology) <= HOMENODE_TOPOLOGY_BYTES, "bytes to map");
#undef HOMENODE_AT

/* What is wrong with a page; 0 is nothing. homenode_topology_error() has the words. */
enum homenode_topology_verdict {
	HOMENODE_TOPOLOGY_GOOD,
	HOMENODE_TOPOLOGY_TORN,
	HOMENODE_TOPOLOGY_BAD_MAGIC,
	HOMENODE_TOPOLOGY_BAD_LAYOUT,
	HOMENODE_TOPOLOGY_BAD_SIZE,
	HOMENODE_TOPOLOGY_BAD_VCPU_COUNT,
	HOMENODE_TOPOLOGY_BAD_VNODE_COUNT,
	HOMENODE_TOPOLOGY_BAD_PNODE_COUNT,
	HOMENODE_TOPOLOGY_BAD_VCPU_PNODE,
	HOMENODE_TOPOLOGY_BAD_VCPU_VNODE,
	HOMENODE_TOPOLOGY_BAD_VNODE_PNODE,
	HOMENODE_TOPOLOGY_BAD_DISTANCE,
	HOMENODE_TOPOLOGY_NO_MEMORY,
	HOMENODE_TOPOLOGY_VERDICTS
};

static inline const char *homenode_topology_error(enum homenode_topology_verdict verdict)
{
	static const char *const words[HOMENODE_TOPOLOGY_VERDICTS] = {
		"nothing is wrong with it",
		"it is being written all the time, or its writer died while writing",
		"it does not begin with the magic number of a topology page",
		"it has another layout version than 1",
		"it states another size than its layout has",
		"it states no vCPU, or more than 1024",
		"it states no virtual node, or more than 64",
		"it states no host node, or more than 64",
		"it has a vCPU on a host node that there is not",
		"it has a vCPU on a virtual node that there is not",
		"it has memory on a host node that there is not",
		"it has a distance below 10, or one other than 10 from a node to itself",
		"it has no virtual node with memory",
	};

	return verdict < HOMENODE_TOPOLOGY_VERDICTS ? words[verdict] : "unknown";
}

/* The version of a page: one load. Odd while it is written. */
static inline __u64 homenode_topology_sequence(const struct homenode_topology *page)
{
	return __atomic_load_n(&page->sequence, __ATOMIC_ACQUIRE);
}

/* Whether a private copy is what a page may be. Never looks outside of its bounds. */
static inline enum homenode_topology_verdict homenode_topology_check(const struct homenode_topology *copy)
{
	__u32 vcpu, from, to, vnode, with_memory = 0;

	if (copy->magic != HOMENODE_TOPOLOGY_MAGIC)
		return HOMENODE_TOPOLOGY_BAD_MAGIC;
	if (copy->layout != HOMENODE_TOPOLOGY_LAYOUT)
		return HOMENODE_TOPOLOGY_BAD_LAYOUT;
	if (copy->size != sizeof(*copy))
		return HOMENODE_TOPOLOGY_BAD_SIZE;
	if (copy->vcpu_count == 0 || copy->vcpu_count > HOMENODE_TOPOLOGY_VCPUS_MAX)
		return HOMENODE_TOPOLOGY_BAD_VCPU_COUNT;
	if (copy->vnode_count == 0 || copy->vnode_count > HOMENODE_TOPOLOGY_VNODES_MAX)
		return HOMENODE_TOPOLOGY_BAD_VNODE_COUNT;
	if (copy->pnode_count == 0 || copy->pnode_count > HOMENODE_TOPOLOGY_PNODES_MAX)
		return HOMENODE_TOPOLOGY_BAD_PNODE_COUNT;
	for (vcpu = 0; vcpu < copy->vcpu_count; vcpu++) {
		__u8 pnode = copy->vcpu_pnode[vcpu];

		if (pnode >= copy->pnode_count && pnode != HOMENODE_TOPOLOGY_NONE)
			return HOMENODE_TOPOLOGY_BAD_VCPU_PNODE;
	}
	for (vcpu = 0; vcpu < copy->vcpu_count; vcpu++) {
		__u8 own = copy->vcpu_vnode[vcpu];

		if (own >= copy->vnode_count && own != HOMENODE_TOPOLOGY_NONE)
			return HOMENODE_TOPOLOGY_BAD_VCPU_VNODE;
	}
	for (vnode = 0; vnode < copy->vnode_count; vnode++) {
		__u8 pnode = copy->vnode_pnode[vnode];

		if (pnode >= copy->pnode_count && pnode != HOMENODE_TOPOLOGY_NONE)
			return HOMENODE_TOPOLOGY_BAD_VNODE_PNODE;
		with_memory += pnode != HOMENODE_TOPOLOGY_NONE;
	}
	for (from = 0; from < copy->pnode_count; from++)
		for (to = 0; to < copy->pnode_count; to++) {
			__u8 distance = copy->distance[from][to];

			if (distance < HOMENODE_TOPOLOGY_LOCAL || (from == to && distance != HOMENODE_TOPOLOGY_LOCAL))
				return HOMENODE_TOPOLOGY_BAD_DISTANCE;
		}
	return with_memory ? HOMENODE_TOPOLOGY_GOOD : HOMENODE_TOPOLOGY_NO_MEMORY;
}

/*
 * Copies a page, whole or not at all: tries a bounded number of times. What the copy holds unless the verdict is GOOD is of no use.
 */
static inline enum homenode_topology_verdict homenode_topology_read(const struct homenode_topology *page,
								      struct homenode_topology *copy)
{
	typedef __u64 __attribute__((__may_alias__)) word;
	const word *from = (const word *)page;
	word *to = (word *)copy;
	int tries;

	for (tries = 0; tries < HOMENODE_TOPOLOGY_TRIES; tries++) {
		__u64 before = homenode_topology_sequence(page);
		unsigned int at;

		if (before & 1) {
			__builtin_ia32_pause();
			continue;
		}
		for (at = 0; at < sizeof(*page) / sizeof(word); at++)
			to[at] = __atomic_load_n(&from[at], __ATOMIC_RELAXED);
		__atomic_thread_fence(__ATOMIC_ACQUIRE);
		if (__atomic_load_n(&page->sequence, __ATOMIC_RELAXED) != before)
			continue;
		copy->sequence = before;
		return homenode_topology_check(copy);
	}
	return HOMENODE_TOPOLOGY_TORN;
}

/*
 * The virtual node that a vCPU belongs to: the one the page names, otherwise that whose memory is nearest to where the vCPU runs.
 * Of several as near it is the present one, otherwise the first. What is not known stays as it is. Only for a GOOD copy.
 */
static inline __u32 homenode_topology_node(const struct homenode_topology *copy, __u32 vcpu, __u32 present)
{
	__u32 vnode, nearest = present;
	__u32 least = 256;
	__u8 pnode;

	if (vcpu >= copy->vcpu_count)
		return present;
	if (copy->vcpu_vnode[vcpu] != HOMENODE_TOPOLOGY_NONE)
		return copy->vcpu_vnode[vcpu];
	pnode = copy->vcpu_pnode[vcpu];
	if (pnode == HOMENODE_TOPOLOGY_NONE)
		return present;
	for (vnode = 0; vnode < copy->vnode_count; vnode++) {
		__u8 memory = copy->vnode_pnode[vnode];
		__u32 distance;

		if (memory == HOMENODE_TOPOLOGY_NONE)
			continue;
		distance = copy->distance[pnode][memory];
		if (distance < least || (distance == least && vnode == present)) {
			least = distance;
			nearest = vnode;
		}
	}
	return nearest;
}

#endif
