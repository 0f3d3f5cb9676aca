/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libhomenode_hotspot.so: an unmodified HotSpot's young objects follow their threads' vCPUs. Preloaded together with
 * libhomenode_hotspot_numa.so, and without symbol versions, which callers' references to the C library would not match.
 *
 * ParallelGC asks for each eden allocation, and G1 for each region, on which node it is: by sched_getcpu() and the table of hotspot.h.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hotspot.h"
#include "say.h"

#define EXPORT __attribute__((visibility("default")))
/* Tried, and their libnuma calls read: see docs/TOPOLOGY.md. */
#define TESTED_JVM 17
#define UNTESTED_VARIABLE "HOMENODE_UNTESTED_JVM"

static struct homenode_hotspot hotspot;
static char no_page[HOMENODE_ERROR_BYTES];
static bool following;
static int (*next_sched_getcpu)(void);
static long (*next_sysconf)(int);

/* Resolved at the first call: others' constructors may come before ours. */
static int first_sched_getcpu(void)
{
	next_sched_getcpu = (int (*)(void))dlsym(RTLD_NEXT, "sched_getcpu");
	return next_sched_getcpu();
}

static long first_sysconf(int name)
{
	next_sysconf = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
	return next_sysconf(name);
}

static int (*next_sched_getcpu)(void) = first_sched_getcpu;
static long (*next_sysconf)(int) = first_sysconf;

/* HotSpot's table has this many CPUs: with fewer than nodes, a node would have none to answer with. */
EXPORT long sysconf(int name)
{
	long value = next_sysconf(name);

	if (name == _SC_NPROCESSORS_CONF && value < (long)hotspot.nodes)
		return (long)hotspot.nodes;
	return value;
}

EXPORT int sched_getcpu(void)
{
	int cpu = next_sched_getcpu();

	if (!following || cpu < 0)
		return cpu;
	int node = homenode_node_of_vcpu(hotspot.topology, (unsigned)cpu);
	if (node < 0)
		return cpu;
	/* Not always the node's first: others take the CPU's number to keep out of each other's way. */
	unsigned answer = (unsigned)cpu - (unsigned)cpu % hotspot.nodes + (unsigned)node;
	return answer < hotspot.cpus ? (int)answer : node;
}

/* Ours, whoever answers to the name. */
extern int own_sched_getcpu(void) __attribute__((alias("sched_getcpu"), visibility("hidden"), nothrow, leaf));

__attribute__((constructor)) static void begin(void)
{
	hotspot.topology = homenode_open(NULL, no_page);
	if (!hotspot.topology)
		return;
	/* What sysconf() says depends on the first, and the second on that. */
	hotspot.nodes = homenode_nodes(hotspot.topology);
	hotspot.cpus = (unsigned)sysconf(_SC_NPROCESSORS_CONF);
	if (strcmp(program_invocation_short_name, "java") == 0 && !dlsym(RTLD_DEFAULT, "homenode_hotspot_numa"))
		say("libhomenode_hotspot_numa.so is not preloaded (LD_PRELOAD needs both); the JVM runs as without");
}

/* The JVM's major version, from the file beside its library that says so; 0 if there is none. */
static int jvm_version(void)
{
	void *library = dlsym(RTLD_DEFAULT, "JNI_CreateJavaVM");
	char path[PATH_MAX], line[256];
	int version = 0;
	Dl_info where;

	/* .../lib/server/libjvm.so and .../release */
	if (!library || !dladdr(library, &where) || !realpath(where.dli_fname, path))
		return 0;
	for (int up = 0; up < 3; up++) {
		char *slash = strrchr(path, '/');

		if (!slash)
			return 0;
		*slash = '\0';
	}
	strncat(path, "/release", sizeof(path) - strlen(path) - 1);
	FILE *release = fopen(path, "re");
	if (!release)
		return 0;
	while (version == 0 && fgets(line, sizeof(line), release))
		if (sscanf(line, "JAVA_VERSION=\"%d", &version) != 1)
			version = 0;
	fclose(release);
	return version;
}

EXPORT const struct homenode_hotspot *homenode_hotspot_begin(void)
{
	int version = jvm_version();

	if (!hotspot.topology) {
		say("%s; the JVM runs as without", no_page);
	} else if (dlsym(RTLD_DEFAULT, "sched_getcpu") != (void *)own_sched_getcpu) {
		say("another preloaded library answers sched_getcpu(): put libhomenode_hotspot.so first in LD_PRELOAD; the JVM runs as without");
	} else if (version != TESTED_JVM && !getenv(UNTESTED_VARIABLE)) {
		say("not tested with this JVM (version %d, tested is %d): set " UNTESTED_VARIABLE "=1 to try; the JVM runs as without",
		    version, TESTED_JVM);
	} else {
		following = true;
		return &hotspot;
	}
	return NULL;
}
