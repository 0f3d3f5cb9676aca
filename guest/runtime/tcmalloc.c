/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libhomenode_tcmalloc.so: an unmodified TCMalloc of gperftools gives each thread memory of the node that it is on now. Preloaded
 * before TCMalloc:
 *
 *     LD_PRELOAD=libhomenode_tcmalloc.so:libtcmalloc.so.4
 *
 * All threads of a TCMalloc share its central free lists and its page heap, which know no nodes. So each node gets a TCMalloc of
 * its own: a copy of the library, which takes its memory from that node's stretch of address space alone. A thread that finds
 * itself on another node allocates from the copy there, and gives what it had cached back to the copy that it leaves. After a
 * change of the topology that copy also returns its free memory to the kernel, once. An object goes back to the copy that it is
 * from, which its address tells; where the thread has no cache in that copy, directly to the copy's central lists.
 *
 * Without a topology page, or without TCMalloc behind it, each call goes on to the next allocator and nothing else happens.
 * Objects from before this library was ready belong to the TCMalloc that the program has loaded.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "entries.h"

/* gperftools asks this weak function once, before its first allocation, for the source of its memory. */
#define question _Z24tc_get_sysalloc_overrideP12SysAllocator

/* As gperftools' class SysAllocator is in memory: its virtual functions, and an object that points to them. */
struct source;
static const struct {
	const void *offset, *type;
	void (*destroy)(struct source *), (*destroy_and_delete)(struct source *);
	void *(*alloc)(struct source *, size_t bytes, size_t *actual, size_t alignment);
} source_functions;

struct source {
	const void *functions;
	struct stretch *stretch;
};

/* What is called in a TCMalloc: function pointers only. */
struct functions {
	struct allocator allocator;
	size_t (*usable)(void *);
	void (*leave)(void);
	void (*release)(void);
};

/* A TCMalloc. The one that the program has loaded is at LOADED. */
enum { LOADED = HOMENODE_TOPOLOGY_VNODES_MAX };
static struct instance {
	struct functions does;
	struct source source;
	atomic_uint_least64_t released; /* the topology's version when it last returned its free memory */
} instances[LOADED + 1];

static homenode *topology;

/* --- Memory --- */

static void source_destroy(struct source *source)
{
	(void)source;
}

static void *source_alloc(struct source *source, size_t bytes, size_t *actual, size_t alignment)
{
	const size_t page = 4096;
	size_t whole = (bytes + page - 1) & ~(page - 1);
	void *begin = whole < bytes ? NULL : stretch_take(source->stretch, whole, alignment < page ? page : alignment);

	if (begin && actual)
		*actual = whole;
	return begin;
}

static const __typeof__(source_functions) source_functions = {
	.destroy = source_destroy,
	.destroy_and_delete = source_destroy,
	.alloc = source_alloc,
};

/* The copy that is being loaded, until it has asked. */
static struct instance *loading;

struct source *question(struct source *theirs);
EXPORT struct source *question(struct source *theirs)
{
	struct source *ours = loading ? &loading->source : theirs;

	loading = NULL;
	return ours;
}

/* --- Threads --- */

static inline struct instance *instance_of(const void *object)
{
	int node = stretch_of(object);

	return &instances[node < 0 ? LOADED : node];
}

__attribute__((noinline)) static void look(void)
{
	own.left = LOOK_BYTES;
	if (stretches_bytes == 0)
		return;
	uint64_t version = homenode_version(topology);
	int node = homenode_node(topology);
	if (node < 0 || (unsigned)node == own.node)
		return;
	struct instance *left = &instances[own.node == NOWHERE ? LOADED : own.node];

	own.node = (unsigned)node;
	own.begin = stretches_begin + (uintptr_t)node * STRETCH;
	own.here = &instances[node].does.allocator;
	left->does.leave();
	/* A thread may change nodes often without a change of the topology: then memory stays for the threads that come. */
	if (atomic_exchange(&left->released, version) != version)
		left->does.release();
}

__attribute__((noinline)) static bool free_elsewhere(void *object)
{
	if (stretches_bytes == 0)
		return false;
	instance_of(object)->does.allocator.free(object);
	return true;
}

__attribute__((noinline)) static bool realloc_elsewhere(void *object, size_t bytes, void **moved)
{
	struct instance *owner = instance_of(object), *here = &instances[own.node == NOWHERE ? LOADED : own.node];

	if (!object || owner == here)
		return false;
	if (bytes == 0) {
		*moved = owner->does.allocator.realloc(object, 0);
		return true;
	}
	*moved = own.here->malloc(bytes);
	if (*moved) {
		size_t before = owner->does.usable(object);

		memcpy(*moved, object, before < bytes ? before : bytes);
		owner->does.allocator.free(object);
	}
	return true;
}

/* --- What else TCMalloc has that takes an object --- */

size_t malloc_usable_size(void *object);
EXPORT size_t malloc_usable_size(void *object)
{
	static size_t (*loaded)(void *);

	if (!loaded)
		loaded = (size_t(*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
	int node = stretch_of(object);
	return node < 0 ? loaded(object) : instances[node].does.usable(object);
}

/* How an object was allocated makes no difference to TCMalloc, so one function frees all. */
#define ALSO(name, of) EXPORT extern __typeof__(of) name __attribute__((alias(#of), copy(of)));
ALSO(malloc_size, malloc_usable_size)
ALSO(tc_malloc_size, malloc_usable_size)
ALSO(MallocExtension_GetAllocatedSize, malloc_usable_size)
ALSO(tc_realloc, realloc)
ALSO(cfree, free)
ALSO(tc_free, free)
ALSO(tc_cfree, free)
ALSO(tc_free_sized, free)
ALSO(tc_delete, free)
ALSO(tc_delete_sized, free)
ALSO(tc_delete_nothrow, free)
ALSO(tc_delete_aligned, free)
ALSO(tc_delete_sized_aligned, free)
ALSO(tc_delete_aligned_nothrow, free)
ALSO(tc_deletearray, free)
ALSO(tc_deletearray_sized, free)
ALSO(tc_deletearray_nothrow, free)
ALSO(tc_deletearray_aligned, free)
ALSO(tc_deletearray_sized_aligned, free)
ALSO(tc_deletearray_aligned_nothrow, free)

/* The node whose memory an object is in, by its address; -1 if it is not from a node's copy. For tests and the curious. */
int homenode_tcmalloc_node_of(const void *object);
EXPORT int homenode_tcmalloc_node_of(const void *object)
{
	return stretch_of(object);
}

/* --- Beginning --- */

/* Finds the loaded TCMalloc; NULL if what comes next is not one, all of it. */
static struct link_map *find_tcmalloc(void)
{
	struct functions *loaded = &instances[LOADED].does;
	struct link_map *first = NULL, *map;
	Dl_info unused;

	loaded->allocator = next;
	loaded->usable = (__typeof__(loaded->usable))dlsym(RTLD_NEXT, "malloc_usable_size");
	loaded->leave = (__typeof__(loaded->leave))dlsym(RTLD_NEXT, "MallocExtension_MarkThreadIdle");
	loaded->release = (__typeof__(loaded->release))dlsym(RTLD_NEXT, "MallocExtension_ReleaseFreeMemory");
	for (void **at = (void **)loaded; at < (void **)(loaded + 1); at++) {
		if (!*at || !dladdr1(*at, &unused, (void **)&map, RTLD_DL_LINKMAP) || (first && map != first))
			return NULL;
		first = map;
	}
	return first;
}

/* What a copy for each node would not agree with; NULL if nothing. */
static const char *find_obstacle(const struct link_map *tcmalloc)
{
	void *start = dlsym(RTLD_NEXT, "ProfilerStart");
	struct link_map *map;
	Dl_info unused;

	if (getenv("HEAPPROFILE") || getenv("HEAPCHECK"))
		return "HEAPPROFILE or HEAPCHECK is set, and would see one node's objects only";
	if (start && dladdr1(start, &unused, (void **)&map, RTLD_DL_LINKMAP) && map == tcmalloc)
		return "this TCMalloc has a profiler in it (preload libtcmalloc.so.4 instead)";
	/* It checks that an object is freed by the counterpart of what allocated it. */
	if (strstr(tcmalloc->l_name, "_debug"))
		return "this TCMalloc is for debugging (preload libtcmalloc.so.4 instead)";
	return NULL;
}

/* Whether a copy must find a function elsewhere: here. What it allocates for itself may be freed by the C++ library. */
static bool is_ours(const char *name)
{
	static const char *const names[] = {
		"_Z24tc_get_sysalloc_overrideP12SysAllocator",
		"realloc",
#define X(type, name, parameters, bytes, arguments) #name,
		ALLOCATING(X)
#undef X
#define X(name, parameters, arguments) #name,
		FREEING(X)
#undef X
	};

	for (size_t at = 0; at < sizeof(names) / sizeof(*names); at++)
		if (strcmp(name, names[at]) == 0)
			return true;
	return false;
}

/*
 * Makes a library, of which the loader has taken another copy, ready to be loaded once more: its names mean its own functions and
 * variables before others', even those of which a process otherwise has one, and the entry points mean ours.
 */
static bool make_separate(char *image, size_t bytes)
{
	const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
	const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
	bool has_symbols = false, has_flags = false;

	if (bytes < sizeof(*header) || header->e_shoff > bytes || header->e_shnum > (bytes - header->e_shoff) / sizeof(*sections))
		return false;
	for (const Elf64_Shdr *section = sections; section < sections + header->e_shnum; section++) {
		bool is_symbols = section->sh_type == SHT_DYNSYM, is_flags = section->sh_type == SHT_DYNAMIC;

		if (!is_symbols && !is_flags)
			continue;
		if (section->sh_offset > bytes || section->sh_size > bytes - section->sh_offset || section->sh_link >= header->e_shnum)
			return false;
		Elf64_Dyn *entries = (Elf64_Dyn *)(image + section->sh_offset);
		Elf64_Sym *symbols = (Elf64_Sym *)(image + section->sh_offset);
		const Elf64_Shdr *names = &sections[section->sh_link];

		for (size_t at = 0; is_flags && at < section->sh_size / sizeof(*entries); at++) {
			if (entries[at].d_tag == DT_FLAGS) {
				entries[at].d_un.d_val |= DF_SYMBOLIC;
				has_flags = true;
			}
		}
		for (size_t at = 0; is_symbols && at < section->sh_size / sizeof(*symbols); at++) {
			size_t name = names->sh_offset + symbols[at].st_name;

			if (name >= bytes || !memchr(image + name, '\0', bytes - name))
				return false;
			if (ELF64_ST_BIND(symbols[at].st_info) == STB_GNU_UNIQUE)
				symbols[at].st_info = ELF64_ST_INFO(STB_GLOBAL, ELF64_ST_TYPE(symbols[at].st_info));
			if (is_ours(image + name)) {
				symbols[at].st_shndx = SHN_UNDEF;
				symbols[at].st_value = 0;
				has_symbols = true;
			}
		}
	}
	return has_symbols && has_flags;
}

/* Writes a library into a file in memory and makes it separate. Returns the descriptor, or -1. */
static int copy_library(const char *path)
{
	int from = open(path, O_RDONLY | O_CLOEXEC), to = memfd_create("tcmalloc", MFD_CLOEXEC);
	char *image = MAP_FAILED;
	bool is_ready = false;
	struct stat status;

	if (from >= 0 && to >= 0 && fstat(from, &status) == 0 && ftruncate(to, status.st_size) == 0)
		image = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, to, 0);
	if (image != MAP_FAILED) {
		is_ready = pread(from, image, (size_t)status.st_size, 0) == status.st_size &&
			   make_separate(image, (size_t)status.st_size);
		munmap(image, (size_t)status.st_size);
	}
	if (from >= 0)
		close(from);
	if (to >= 0 && !is_ready) {
		close(to);
		to = -1;
	}
	return to;
}

/* Loads a copy for a node. Returns what is wrong, or NULL. The loader knows a file by its name, so the descriptor stays open. */
static const char *load(struct instance *instance, const struct link_map *tcmalloc, int *file)
{
	void **from = (void **)&instances[LOADED].does, **to = (void **)&instance->does;
	struct link_map *copy;
	char name[32];

	*file = copy_library(tcmalloc->l_name);
	if (*file < 0)
		return "TCMalloc cannot be copied into memory (not gperftools 2, or vm.memfd_noexec forbids it)";
	snprintf(name, sizeof(name), "/proc/self/fd/%d", *file);
	loading = instance;
	copy = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!copy) {
		const char *why = dlerror();

		loading = NULL;
		return strstr(why, "static TLS") ? "the C library has no room for a copy of TCMalloc for each node "
						   "(set GLIBC_TUNABLES=glibc.rtld.optional_static_tls=16384)" : why;
	}
	if (loading) {
		loading = NULL;
		return "a copy of the library does not ask for memory (is it gperftools 2?)";
	}
	for (size_t at = 0; at < sizeof(struct functions) / sizeof(*from); at++)
		to[at] = (char *)from[at] - tcmalloc->l_addr + copy->l_addr;
	return NULL;
}

static const char *lay_out(unsigned nodes, const struct link_map *tcmalloc)
{
	int files[HOMENODE_TOPOLOGY_VNODES_MAX];
	const char *error = stretches_reserve(nodes);
	unsigned loaded = 0;

	for (; !error && loaded < nodes; loaded++) {
		instances[loaded].source = (struct source){ &source_functions.destroy, &stretches[loaded] };
		error = load(&instances[loaded], tcmalloc, &files[loaded]);
	}
	for (unsigned node = 0; node < loaded; node++)
		if (files[node] >= 0)
			close(files[node]);
	if (!error)
		stretches_follow(nodes);
	return error;
}

__attribute__((constructor)) static void begin(void)
{
	topology = open_before("TCMalloc");
	if (!topology)
		return;
	const struct link_map *tcmalloc = find_tcmalloc();
	if (!tcmalloc) {
		say("TCMalloc is not what comes next (put libtcmalloc.so.4 behind libhomenode_tcmalloc.so in LD_PRELOAD); "
		    "the program runs as without");
		return;
	}
	const char *error = find_obstacle(tcmalloc);
	if (!error)
		error = lay_out(homenode_nodes(topology), tcmalloc);
	if (error)
		say("%s; TCMalloc runs as without", error);
	own.left = 0;
}
