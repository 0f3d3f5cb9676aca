/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libhomenode_topology: where this virtual machine's vCPUs and memory are on its host, now. For allocators and runtimes.
 *
 *     char why[HOMENODE_ERROR_BYTES];
 *     homenode *topology = homenode_open(NULL, why);
 *     if (!topology) { ... why ...; go on as without }
 *     uint64_t seen = homenode_version(topology);
 *     ...
 *     if (homenode_version(topology) != seen) { ... homenode_node(topology) ... }
 *
 * All functions but homenode_open() and homenode_close() may be called by any number of threads at a time, never allocate, take no
 * lock that another thread could hold, and are safe in signal handlers, homenode_wait() aside.
 */
#ifndef HOMENODE_H
#define HOMENODE_H

#include <stdint.h>

#include "homenode_topology.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HOMENODE_DEVICE "/dev/homenode-topology"
/* The page's path if it is not HOMENODE_DEVICE: a device's memory (.../resource2), or a file. */
#define HOMENODE_PATH_VARIABLE "HOMENODE_TOPOLOGY"
#define HOMENODE_ERROR_BYTES 512

/* An open page. Only `page` is for the inline function below; the rest is not part of the interface. */
typedef struct homenode {
	const struct homenode_topology *page;
} homenode;

/*
 * Opens a page: `path`, or if that is NULL what the environment names, or the device. NULL if there is none or it is bad; `why`, of
 * HOMENODE_ERROR_BYTES, then says which and what to do.
 */
homenode *homenode_open(const char *path, char *why);
void homenode_close(homenode *topology);

/* The version: one load. Another one than before says that something changed; no order is meant. */
static inline uint64_t homenode_version(const homenode *topology)
{
	return __atomic_load_n(&topology->page->sequence, __ATOMIC_ACQUIRE);
}

/* How many vCPUs and how many virtual nodes there are: they do not change. */
unsigned homenode_vcpus(const homenode *topology);
unsigned homenode_nodes(const homenode *topology);

/* The virtual node that a vCPU belongs to now: where memory for it should come from. -1 if there is no such vCPU. */
int homenode_node_of_vcpu(homenode *topology, unsigned vcpu);
/* That of the vCPU on which the caller runs. */
int homenode_node(homenode *topology);
/* The host's node that has a virtual node's memory now. -1 if there is no such node, it has no memory, or that is not known. */
int homenode_host_node_of_memory(homenode *topology, unsigned node);
/* The distance, as in ACPI's SLIT, between the memories of two virtual nodes now. -1 if it is not known. */
int homenode_distance(homenode *topology, unsigned from, unsigned to);

/* Waits until the version is not `seen`, or that many milliseconds (for ever if negative). 1 if it changed, 0 if not. */
int homenode_wait(homenode *topology, uint64_t seen, int timeout_ms);

/*
 * Versions that were refused since the page was opened, because they were torn or out of bounds; what was known before stays in
 * force. `why`, unless it is NULL, gets what was wrong with the last.
 */
uint64_t homenode_refused(const homenode *topology, const char **why);

#ifdef __cplusplus
}
#endif

#endif
