/* SPDX-License-Identifier: Apache-2.0 */
/*
 * In a guest with the kernel module, static: what a program there sees.
 *
 *   probe nodes         for each CPU a line: "cpu CPU vdso N syscall N list N link N page N pages NX=COUNT..."; -1 where there is none
 *   probe replug CPU    takes a CPU offline and online, and says how many microseconds that took
 *   probe wait VERSION  waits (10 s) until the page has another version, and says which
 *   probe write         tries to map the page for writing, and says what came of it
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "homenode.h"

enum { PAGES = 64, PAGE = 4096 };

/* The node in whose list of CPUs this one is. */
static int listed(int cpu)
{
	for (int node = 0; node < 64; node++) {
		char path[64], text[256] = "";

		snprintf(path, sizeof(path), "/sys/devices/system/node/node%d/cpulist", node);
		FILE *file = fopen(path, "r");
		if (!file)
			continue;
		char *at = fgets(text, sizeof(text), file);
		fclose(file);
		while (at && *at >= '0' && *at <= '9') {
			long first = strtol(at, &at, 10), last = first;

			if (*at == '-')
				last = strtol(at + 1, &at, 10);
			if (cpu >= first && cpu <= last)
				return node;
			at += *at == ',';
		}
	}
	return -1;
}

/* The node that has a link to this CPU, and it to that; -2 if there are others. */
static int linked(int cpu)
{
	int found = -1;

	for (int node = 0; node < 64; node++) {
		char there[64], back[64];

		snprintf(there, sizeof(there), "/sys/devices/system/node/node%d/cpu%d", node, cpu);
		snprintf(back, sizeof(back), "/sys/devices/system/cpu/cpu%d/node%d", cpu, node);
		int links = (access(there, F_OK) == 0) + (access(back, F_OK) == 0);
		if (links == 1 || (links == 2 && found != -1))
			return -2;
		if (links == 2)
			found = node;
	}
	return found;
}

/* What the kernel says of these pages, as "N0=60 N3=4". */
static void print_placement(const void *begin)
{
	char line[1024], start[32];
	FILE *maps = fopen("/proc/self/numa_maps", "r");

	snprintf(start, sizeof(start), "%lx ", (unsigned long)begin);
	while (maps && fgets(line, sizeof(line), maps)) {
		if (strncmp(line, start, strlen(start)) != 0)
			continue;
		for (char *word = strtok(line, " \n"); word; word = strtok(NULL, " \n"))
			if (word[0] == 'N' && word[1] >= '0' && word[1] <= '9')
				printf(" %s", word);
	}
	if (maps)
		fclose(maps);
}

static int nodes(void)
{
	char why[HOMENODE_ERROR_BYTES];
	homenode *topology = homenode_open(NULL, why);

	if (!topology)
		printf("%s\n", why);
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		unsigned on, vdso, kernel;
		cpu_set_t only;

		CPU_ZERO(&only);
		CPU_SET(cpu, &only);
		if (sched_setaffinity(0, sizeof(only), &only) != 0)
			continue;
		getcpu(&on, &vdso);
		syscall(SYS_getcpu, &on, &kernel, NULL);
		/* Nobody else's neighbour, so that it has a line of its own. */
		char *memory = mmap(NULL, (PAGES + 2) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		mprotect(memory + PAGE, PAGES * PAGE, PROT_READ | PROT_WRITE);
		madvise(memory + PAGE, PAGES * PAGE, MADV_NOHUGEPAGE);
		for (int page = 1; page <= PAGES; page++)
			memory[page * PAGE] = 1;
		printf("cpu %d vdso %u syscall %u list %d link %d page %d pages", cpu, vdso, kernel, listed(cpu), linked(cpu),
		       topology ? homenode_node_of_vcpu(topology, (unsigned)cpu) : -1);
		print_placement(memory + PAGE);
		printf("\n");
		munmap(memory, (PAGES + 2) * PAGE);
	}
	return 0;
}

static int put(const char *path, const char *text)
{
	int file = open(path, O_WRONLY);
	int written = file >= 0 && write(file, text, strlen(text)) > 0;

	if (file >= 0)
		close(file);
	return written;
}

static int replug(const char *cpu)
{
	struct timespec begin, end;
	char path[64];

	snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%s/online", cpu);
	clock_gettime(CLOCK_MONOTONIC, &begin);
	if (!put(path, "0") || !put(path, "1"))
		return 1;
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("%ld\n", (long)(end.tv_sec - begin.tv_sec) * 1000000 + (end.tv_nsec - begin.tv_nsec) / 1000);
	return 0;
}

static int await_change(const char *version)
{
	char why[HOMENODE_ERROR_BYTES];
	homenode *topology = homenode_open(NULL, why);

	if (!topology || !homenode_wait(topology, strtoull(version, NULL, 10), 10000))
		return 1;
	printf("%llu\n", (unsigned long long)homenode_version(topology));
	return 0;
}

static int try_to_write(void)
{
	int file = open(HOMENODE_DEVICE, O_RDONLY);
	void *shared = mmap(NULL, HOMENODE_TOPOLOGY_BYTES, PROT_READ, MAP_SHARED, file, 0);
	void *writable = mmap(NULL, HOMENODE_TOPOLOGY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	int later = shared == MAP_FAILED ? 0 : mprotect(shared, HOMENODE_TOPOLOGY_BYTES, PROT_READ | PROT_WRITE);

	printf("%s\n", shared != MAP_FAILED && writable == MAP_FAILED && later != 0 ? "refused" : "possible");
	return 0;
}

int main(int count, char **arguments)
{
	if (count == 2 && strcmp(arguments[1], "nodes") == 0)
		return nodes();
	if (count == 3 && strcmp(arguments[1], "replug") == 0)
		return replug(arguments[2]);
	if (count == 3 && strcmp(arguments[1], "wait") == 0)
		return await_change(arguments[2]);
	if (count == 2 && strcmp(arguments[1], "write") == 0)
		return try_to_write();
	return 2;
}
