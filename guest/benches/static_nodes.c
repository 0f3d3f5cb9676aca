/* SPDX-License-Identifier: Apache-2.0 */
/* What a JVM on a stock guest with four virtual nodes has: the same table of nodes, and no replacement of sched_getcpu(). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

#include "hotspot.h"

enum { NODES = 4 };

long sysconf(int name)
{
	static long (*next)(int);

	if (!next)
		next = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
	long value = next(name);

	return name == _SC_NPROCESSORS_CONF && value < NODES ? NODES : value;
}

const struct homenode_hotspot *homenode_hotspot_begin(void)
{
	static struct homenode_hotspot nodes = { .nodes = NODES };
	char why[HOMENODE_ERROR_BYTES];

	/* For distances, which are the page's. */
	nodes.topology = homenode_open(NULL, why);
	nodes.cpus = (unsigned)sysconf(_SC_NPROCESSORS_CONF);
	return nodes.topology ? &nodes : NULL;
}
