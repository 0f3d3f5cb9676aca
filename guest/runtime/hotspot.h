/* SPDX-License-Identifier: Apache-2.0 */
/* What the two objects that HotSpot needs say to each other. */
#ifndef HOMENODE_HOTSPOT_H
#define HOMENODE_HOTSPOT_H

#include "homenode.h"

/*
 * HotSpot asks libnuma once which CPUs each node has, and keeps that. So it is told that CPU c is on node c % nodes for good, and
 * sched_getcpu() then answers with a CPU of the node that the caller is on now.
 */
struct homenode_hotspot {
	homenode *topology;
	unsigned nodes;
	unsigned cpus; /* that HotSpot's table has room for: at least one for each node */
};

/* From libhomenode_hotspot.so, when HotSpot asks libnuma whether it is available: what to tell it, or NULL to stay out of it. */
const struct homenode_hotspot *homenode_hotspot_begin(void);
/* From libhomenode_hotspot_numa.so: says that it is there. */
extern const int homenode_hotspot_numa;

#endif
