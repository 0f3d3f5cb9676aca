/* SPDX-License-Identifier: Apache-2.0 */
/* Allocates in every way there is when it is told to, and says on which node each object is: a line for each way, "name node" where
 * all are on one node, "name mixed" otherwise. Then a line "done". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { OBJECTS = 2000, MIXED = -2 };

/* Of the preloaded library. */
static int (*node_of)(const void *);
static void *(*operator_new)(size_t), *(*operator_new_aligned)(size_t, size_t);
static void (*operator_delete)(void *), (*operator_delete_sized)(void *, size_t);
/* TCMalloc's; it aborts if it does not know the object. */
static size_t (*allocated_size)(const void *);
static void *kept[OBJECTS];

static void *from_malloc(size_t bytes) { return malloc(bytes); }
static void *from_calloc(size_t bytes) { return calloc(4, bytes / 4 + 1); }
static void *from_realloc(size_t bytes) { return realloc(malloc(16), bytes); }
static void *from_aligned_alloc(size_t bytes) { return aligned_alloc(64, (bytes + 63) & ~63ul); }
static void *from_memalign(size_t bytes) { return memalign(256, bytes); }
static void *from_valloc(size_t bytes) { return valloc(bytes); }
static void *from_new(size_t bytes) { return operator_new(bytes); }
static void *from_aligned_new(size_t bytes) { return operator_new_aligned(bytes, 128); }
static void *from_strdup(size_t bytes)
{
	char text[8192];

	memset(text, 'x', bytes);
	text[bytes] = '\0';
	return strdup(text);
}
static void *from_posix_memalign(size_t bytes)
{
	void *object = NULL;

	return posix_memalign(&object, 4096, bytes) == 0 ? object : NULL;
}

static void free_kept(void)
{
	for (int at = 0; at < OBJECTS; at++) {
		switch (at % 3) {
		case 0:
			free(kept[at]);
			break;
		case 1:
			operator_delete(kept[at]);
			break;
		default:
			kept[at] = realloc(kept[at], 24);
			free(kept[at]);
		}
	}
}

static size_t size_of(int at) { return 16 + (size_t)at * 37 % 5000; }

static void report(const char *name, void *(*allocate)(size_t))
{
	int node = -1;

	for (int at = 0; at < OBJECTS; at++) {
		kept[at] = allocate(size_of(at));
		memset(kept[at], 1, 1);
		if (allocated_size && allocated_size(kept[at]) < size_of(at))
			abort();
		int its = node_of ? node_of(kept[at]) : -1;
		node = at == 0 || its == node ? its : MIXED;
		if (node == MIXED)
			break;
	}
	if (node == MIXED)
		printf("%s mixed\n", name);
	else
		printf("%s %d\n", name, node);
	free_kept();
	memset(kept, 0, sizeof(kept));
}

static void *all(void *unused)
{
	/* A thread looks at each large object: what comes before one is not meant. */
	free(malloc(1 << 20));
	report("malloc", from_malloc);
	report("calloc", from_calloc);
	report("realloc", from_realloc);
	report("aligned_alloc", from_aligned_alloc);
	report("posix_memalign", from_posix_memalign);
	report("memalign", from_memalign);
	report("valloc", from_valloc);
	report("strdup", from_strdup);
	report("new", from_new);
	report("aligned_new", from_aligned_new);
	return unused;
}

/* Objects of where it was are freed where it is; none of them may come back. */
static void *stay[OBJECTS];

static void keep(void)
{
	for (int at = 0; at < OBJECTS; at++)
		memset(stay[at] = malloc(size_of(at)), 1, size_of(at));
}

/* In use, as jemalloc counts it; 0 of another allocator. */
static size_t allocated(void)
{
	int (*mallctl)(const char *, void *, size_t *, void *, size_t) =
		(int (*)(const char *, void *, size_t *, void *, size_t))dlsym(RTLD_DEFAULT, "mallctl");
	unsigned long epoch = 1;
	size_t bytes = 0, size = sizeof(bytes);

	if (!mallctl)
		return 0;
	mallctl("thread.tcache.flush", NULL, NULL, NULL, 0);
	mallctl("epoch", NULL, NULL, &epoch, sizeof(epoch));
	mallctl("stats.allocated", &bytes, &size, NULL, 0);
	return bytes;
}

/* In memory, as the kernel counts it. */
static size_t resident(void)
{
	char text[128] = "";
	size_t size = 0, pages = 0;
	FILE *file = fopen("/proc/self/statm", "r");

	if (file && fgets(text, sizeof(text), file))
		sscanf(text, "%zu %zu", &size, &pages);
	if (file)
		fclose(file);
	return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* How many of the objects that are kept are on each node, as the kernel has it. */
static void print_nodes(void)
{
	static int status[OBJECTS];
	int on[8] = { 0 };

	syscall(SYS_move_pages, 0, (unsigned long)OBJECTS, stay, NULL, status, 0);
	for (int at = 0; at < OBJECTS; at++)
		if (status[at] >= 0 && status[at] < 8)
			on[status[at]]++;
	for (int node = 0; node < 8; node++)
		printf(node < 7 ? "%d " : "%d\n", on[node]);
}

int main(void)
{
	char line[16];
	pthread_t thread;

	setvbuf(stdout, NULL, _IOLBF, 4096);
	node_of = (int (*)(const void *))dlsym(RTLD_DEFAULT, "homenode_jemalloc_node_of");
	if (!node_of)
		node_of = (int (*)(const void *))dlsym(RTLD_DEFAULT, "homenode_tcmalloc_node_of");
	allocated_size = (size_t(*)(const void *))dlsym(RTLD_DEFAULT, "MallocExtension_GetAllocatedSize");
	operator_new = (void *(*)(size_t))dlsym(RTLD_DEFAULT, "_Znwm");
	operator_new_aligned = (void *(*)(size_t, size_t))dlsym(RTLD_DEFAULT, "_ZnwmSt11align_val_t");
	operator_delete = (void (*)(void *))dlsym(RTLD_DEFAULT, "_ZdlPv");
	operator_delete_sized = (void (*)(void *, size_t))dlsym(RTLD_DEFAULT, "_ZdlPvm");
	if (!operator_new || !operator_new_aligned || !operator_delete || !operator_delete_sized)
		return 1;
	printf("ready\n");
	while (fgets(line, sizeof(line), stdin)) {
		switch (line[0]) {
		case 'a': /* allocate, in this thread */
			all(NULL);
			break;
		case 't': /* and in another */
			pthread_create(&thread, NULL, all, NULL);
			pthread_join(thread, NULL);
			break;
		case 'k': /* keep some */
			keep();
			break;
		case 'n': /* say where those are */
			print_nodes();
			break;
		case 'f': /* free those */
			for (int at = 0; at < OBJECTS; at++) {
				if (at % 2)
					free(stay[at]);
				else
					operator_delete_sized(stay[at], size_of(at));
			}
			break;
		case 'b': /* say how much is in use */
			printf("%zu\n", allocated());
			break;
		case 'r': /* and how much in memory */
			printf("%zu\n", resident());
			break;
		}
		printf("done\n");
	}
	return 0;
}
