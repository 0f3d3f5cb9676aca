/* SPDX-License-Identifier: Apache-2.0 */
/* The page as programs see it; see homenode.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "homenode.h"

/* What was made of the last good version. Every figure is written and read alone, and is in bounds at any time. */
struct known {
	homenode shared;
	int file;
	bool is_device;
	unsigned vcpus, nodes;
	atomic_uint_least64_t sequence; /* that was looked at last, good or not */
	atomic_uint_least64_t refused;
	atomic_int verdict; /* of the last that was refused */
	atomic_flag refreshing;
	struct homenode_topology copy; /* of who has set `refreshing` */
	atomic_uchar node[HOMENODE_TOPOLOGY_VCPUS_MAX];
	atomic_uchar memory[HOMENODE_TOPOLOGY_VNODES_MAX];
	atomic_uchar distance[HOMENODE_TOPOLOGY_VNODES_MAX][HOMENODE_TOPOLOGY_VNODES_MAX];
};

/* The nodes that the kernel gives CPUs, from lists as "0-3,8". */
static void read_present_nodes(struct known *known)
{
	for (unsigned node = 0; node < known->nodes; node++) {
		char path[64], list[4096], *at = list;

		snprintf(path, sizeof(path), "/sys/devices/system/node/node%u/cpulist", node);
		int file = open(path, O_RDONLY | O_CLOEXEC);
		if (file < 0)
			continue;
		ssize_t length = read(file, list, sizeof(list) - 1);
		close(file);
		list[length > 0 ? length : 0] = '\0';
		while (*at >= '0' && *at <= '9') {
			unsigned long first = strtoul(at, &at, 10), last = first;

			if (*at == '-')
				last = strtoul(at + 1, &at, 10);
			for (unsigned long cpu = first; cpu <= last && cpu < known->vcpus; cpu++)
				known->node[cpu] = (unsigned char)node;
			at += *at == ',';
		}
	}
}

static void take(struct known *known)
{
	const struct homenode_topology *copy = &known->copy;

	for (unsigned vcpu = 0; vcpu < known->vcpus; vcpu++)
		known->node[vcpu] = (unsigned char)homenode_topology_node(copy, vcpu, known->node[vcpu]);
	for (unsigned from = 0; from < known->nodes; from++) {
		unsigned char memory = copy->vnode_pnode[from];

		known->memory[from] = memory;
		for (unsigned to = 0; to < known->nodes; to++) {
			unsigned char other = copy->vnode_pnode[to];
			bool both = memory != HOMENODE_TOPOLOGY_NONE && other != HOMENODE_TOPOLOGY_NONE;

			known->distance[from][to] = both ? copy->distance[memory][other] : 0;
		}
	}
}

/* Looks at a new version. While another thread does, the caller goes on with what was known before. */
__attribute__((noinline)) static void refresh(struct known *known)
{
	if (atomic_flag_test_and_set_explicit(&known->refreshing, memory_order_acquire))
		return;
	enum homenode_topology_verdict verdict = homenode_topology_read(known->shared.page, &known->copy);
	bool same = known->copy.vcpu_count == known->vcpus && known->copy.vnode_count == known->nodes;

	if (verdict == HOMENODE_TOPOLOGY_GOOD && same) {
		take(known);
		known->sequence = known->copy.sequence;
	} else {
		/* Not again until it is written: neither a page that is bad nor one whose writer died gets better by itself. */
		known->sequence = homenode_version(&known->shared);
		known->verdict = verdict;
		known->refused++;
	}
	atomic_flag_clear_explicit(&known->refreshing, memory_order_release);
}

static inline struct known *current(homenode *topology)
{
	struct known *known = (struct known *)topology;

	if (__builtin_expect(homenode_version(topology) !=
				     atomic_load_explicit(&known->sequence, memory_order_relaxed), 0))
		refresh(known);
	return known;
}

static const char *map(struct known *known, const char *path)
{
	struct stat status;

	known->file = open(path, O_RDONLY | O_CLOEXEC);
	if (known->file < 0 || fstat(known->file, &status) != 0)
		return strerror(errno);
	known->is_device = S_ISCHR(status.st_mode);
	/* Beyond a file's end there is a signal instead of zeros. */
	if (!known->is_device && status.st_size < (off_t)HOMENODE_TOPOLOGY_BYTES)
		return "it is shorter than a topology page";
	void *page = mmap(NULL, HOMENODE_TOPOLOGY_BYTES, PROT_READ, MAP_SHARED, known->file, 0);
	if (page == MAP_FAILED)
		return strerror(errno);
	known->shared.page = page;
	enum homenode_topology_verdict verdict = homenode_topology_read(page, &known->copy);
	if (verdict != HOMENODE_TOPOLOGY_GOOD)
		return homenode_topology_error(verdict);
	return NULL;
}

homenode *homenode_open(const char *path, char *why)
{
	if (!path)
		path = secure_getenv(HOMENODE_PATH_VARIABLE);
	if (!path || !*path)
		path = HOMENODE_DEVICE;
	/* Not malloc: the caller may be one. */
	struct known *known = mmap(NULL, sizeof(*known), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (known == MAP_FAILED) {
		snprintf(why, HOMENODE_ERROR_BYTES, "no memory for the topology page");
		return NULL;
	}
	known->file = -1;
	const char *error = map(known, path);
	if (error) {
		snprintf(why, HOMENODE_ERROR_BYTES, "cannot use the topology page %s: %s%s", path, error,
			 strcmp(path, HOMENODE_DEVICE) == 0 ? " (is the module homenode_topology loaded?)" : "");
		homenode_close(&known->shared);
		return NULL;
	}
	known->vcpus = known->copy.vcpu_count;
	known->nodes = known->copy.vnode_count;
	read_present_nodes(known);
	take(known);
	known->sequence = known->copy.sequence;
	return &known->shared;
}

void homenode_close(homenode *topology)
{
	struct known *known = (struct known *)topology;

	if (known->shared.page)
		munmap((void *)known->shared.page, HOMENODE_TOPOLOGY_BYTES);
	if (known->file >= 0)
		close(known->file);
	munmap(known, sizeof(*known));
}

unsigned homenode_vcpus(const homenode *topology)
{
	return ((const struct known *)topology)->vcpus;
}

unsigned homenode_nodes(const homenode *topology)
{
	return ((const struct known *)topology)->nodes;
}

int homenode_node_of_vcpu(homenode *topology, unsigned vcpu)
{
	struct known *known = current(topology);

	return vcpu < known->vcpus ? atomic_load_explicit(&known->node[vcpu], memory_order_relaxed) : -1;
}

int homenode_node(homenode *topology)
{
	int vcpu = sched_getcpu();

	return vcpu < 0 ? -1 : homenode_node_of_vcpu(topology, (unsigned)vcpu);
}

int homenode_host_node_of_memory(homenode *topology, unsigned node)
{
	struct known *known = current(topology);

	if (node >= known->nodes || known->memory[node] == HOMENODE_TOPOLOGY_NONE)
		return -1;
	return known->memory[node];
}

int homenode_distance(homenode *topology, unsigned from, unsigned to)
{
	struct known *known = current(topology);

	if (from >= known->nodes || to >= known->nodes || known->distance[from][to] == 0)
		return -1;
	return known->distance[from][to];
}

static int64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int homenode_wait(homenode *topology, uint64_t seen, int timeout_ms)
{
	/* Several threads share the device's descriptor, and one may take the news of another: look again now and then. */
	enum { DEVICE_MS = 100, FILE_MS = 5 };
	struct known *known = (struct known *)topology;
	int64_t end = timeout_ms < 0 ? INT64_MAX : now_ms() + timeout_ms;

	while (homenode_version(topology) == seen) {
		int64_t left = end - now_ms();
		int step = known->is_device ? DEVICE_MS : FILE_MS;
		struct pollfd file = { .fd = known->file, .events = POLLIN };

		if (left <= 0)
			return 0;
		/* A file is always ready: its changes are not signalled. */
		if (poll(&file, known->is_device ? 1 : 0, (int)(left < step ? left : step)) > 0) {
			uint64_t version;

			if (read(known->file, &version, sizeof(version)) < 0 && errno != EAGAIN)
				poll(NULL, 0, FILE_MS);
		}
	}
	return 1;
}

uint64_t homenode_refused(const homenode *topology, const char **why)
{
	const struct known *known = (const struct known *)topology;

	if (why)
		*why = known->verdict ? homenode_topology_error((enum homenode_topology_verdict)known->verdict) :
					"it has other numbers of vCPUs or virtual nodes than before";
	return known->refused;
}
