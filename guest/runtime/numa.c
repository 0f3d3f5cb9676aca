/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libhomenode_numa.so: programs that ask libnuma or getcpu() follow. libnuma reads once which CPUs each node has and keeps that; here
 * the page answers instead. What concerns memory goes on to libnuma and the kernel, which know the virtual nodes as they are.
 *
 * With the symbol versions of what it stands before: libnuma has an older numa_node_to_cpus() of other parameters as well.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sched.h>

#include "homenode.h"
#include "say.h"

#define EXPORT __attribute__((visibility("default")))

struct bitmask {
	unsigned long size; /* bits */
	unsigned long *maskp;
};

enum { WORD_BITS = 8 * sizeof(unsigned long) };

static homenode *topology;

__attribute__((constructor)) static void begin(void)
{
	char why[HOMENODE_ERROR_BYTES];

	topology = homenode_open(NULL, why);
	if (!topology)
		say("%s; the program runs as without", why);
}

EXPORT int getcpu(unsigned *cpu, unsigned *node)
{
	static __typeof__(getcpu) *next;
	unsigned on = 0, its = 0;

	if (!next)
		next = (__typeof__(getcpu) *)dlsym(RTLD_NEXT, "getcpu");
	int status = next(&on, &its);
	int known = topology && status == 0 ? homenode_node_of_vcpu(topology, on) : -1;

	if (cpu)
		*cpu = on;
	if (node)
		*node = known >= 0 ? (unsigned)known : its;
	return status;
}

EXPORT int numa_node_of_cpu(int cpu)
{
	static int (*next)(int);
	int node = topology && cpu >= 0 ? homenode_node_of_vcpu(topology, (unsigned)cpu) : -1;

	if (node >= 0)
		return node;
	if (!next)
		next = (int (*)(int))dlsym(RTLD_NEXT, "numa_node_of_cpu");
	return next(cpu);
}

/* The CPUs of a node that this machine has, into a mask of so many bits; how many there are. */
static unsigned cpus_of(int node, unsigned long *words, unsigned long bits)
{
	unsigned cpus = (unsigned)sysconf(_SC_NPROCESSORS_CONF), found = 0;

	memset(words, 0, bits / 8);
	for (unsigned cpu = 0; cpu < cpus && cpu < bits; cpu++)
		if (homenode_node_of_vcpu(topology, cpu) == node) {
			words[cpu / WORD_BITS] |= 1ul << cpu % WORD_BITS;
			found++;
		}
	return found;
}

EXPORT int numa_node_to_cpus(int node, struct bitmask *cpus)
{
	static int (*next)(int, struct bitmask *);

	if (topology && node >= 0 && (unsigned)node < homenode_nodes(topology)) {
		cpus_of(node, cpus->maskp, cpus->size);
		return 0;
	}
	if (!next)
		next = (int (*)(int, struct bitmask *))dlvsym(RTLD_NEXT, "numa_node_to_cpus", "libnuma_1.2");
	return next(node, cpus);
}

EXPORT int numa_run_on_node(int node)
{
	static int (*next)(int);
	cpu_set_t cpus;

	if (topology && node >= 0 && (unsigned)node < homenode_nodes(topology)) {
		if (cpus_of(node, (unsigned long *)&cpus, 8 * sizeof(cpus)) == 0) {
			errno = EINVAL;
			return -1;
		}
		return sched_setaffinity(0, sizeof(cpus), &cpus);
	}
	if (!next)
		next = (int (*)(int))dlsym(RTLD_NEXT, "numa_run_on_node");
	return next(node);
}
