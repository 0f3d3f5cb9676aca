/* SPDX-License-Identifier: Apache-2.0 */
/* What programs learn of a page, a line at each line that is read: "library" by libhomenode_topology, "libnuma" by libnuma and
 * getcpu(). "wait" waits for a change, and says once that it does. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "homenode.h"

/* As in numa.h, which is not needed to run programs. */
struct bitmask {
	unsigned long size;
	unsigned long *maskp;
};
int numa_available(void);
int numa_node_of_cpu(int cpu);
int numa_node_to_cpus(int node, struct bitmask *cpus);
int numa_run_on_node(int node);

static void libnuma(void)
{
	unsigned long words[16];
	struct bitmask cpus = { 8 * sizeof(words), words };
	unsigned cpu, node;

	getcpu(&cpu, &node);
	printf("%d %u", numa_node_of_cpu(0), node);
	for (int of = 0; of < 4; of++)
		printf(" %d%s", numa_node_to_cpus(of, &cpus) == 0 && (words[0] & 1), numa_run_on_node(of) == 0 ? "r" : "");
	printf("\n");
}

int main(void)
{
	char why[HOMENODE_ERROR_BYTES], line[32];
	homenode *topology = homenode_open(NULL, why);
	uint64_t seen = topology ? homenode_version(topology) : 0;
	const char *refusal = "";

	setvbuf(stdout, NULL, _IOLBF, 4096);
	if (numa_available() < 0)
		return 1;
	if (!topology)
		printf("%s\n", why);
	while (fgets(line, sizeof(line), stdin)) {
		if (strcmp(line, "libnuma\n") == 0) {
			libnuma();
		} else if (strcmp(line, "library\n") == 0) {
			printf("%u vcpus %u nodes, on %d, vcpu 3 on %d, 999 on %d, memory 2 on %d, 9 on %d, 1 to 2 %d\n",
			       homenode_vcpus(topology), homenode_nodes(topology), homenode_node(topology),
			       homenode_node_of_vcpu(topology, 3), homenode_node_of_vcpu(topology, 999),
			       homenode_host_node_of_memory(topology, 2), homenode_host_node_of_memory(topology, 9),
			       homenode_distance(topology, 1, 2));
			seen = homenode_version(topology);
		} else if (strcmp(line, "refused\n") == 0) {
			unsigned long long count = homenode_refused(topology, &refusal);

			printf("%llu: %s\n", count, refusal);
		} else if (strcmp(line, "wait\n") == 0) {
			printf("waiting\n");
			printf("%d\n", homenode_wait(topology, seen, 20000));
		} else {
			printf("%d\n", homenode_wait(topology, homenode_version(topology), 1));
		}
	}
	if (topology)
		homenode_close(topology);
	return 0;
}
