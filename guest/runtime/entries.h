/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The entry points of an allocator, for libraries that are preloaded before one: C's, and C++'s operators by their mangled names.
 * A thread looks for its node once in LOOK_BYTES that it allocates, so at each large object. Who includes this defines look(),
 * free_elsewhere() and realloc_elsewhere().
 */
#ifndef HOMENODE_ENTRIES_H
#define HOMENODE_ENTRIES_H

#include <dlfcn.h>
#include <stdlib.h>

#include "stretches.h"

#define EXPORT __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

enum { LOOK_BYTES = 32 << 10, NOWHERE = 0xff };

/* X(type, name, parameters, bytes, arguments). C's come first: looking for a name that does not exist allocates. */
#define ALLOCATING(X)                                                                                                            \
	X(void *, calloc, (size_t count, size_t bytes), count * bytes, (count, bytes))                                           \
	X(void *, malloc, (size_t bytes), bytes, (bytes))                                                                        \
	X(void *, aligned_alloc, (size_t alignment, size_t bytes), bytes, (alignment, bytes))                                    \
	X(int, posix_memalign, (void **object, size_t alignment, size_t bytes), bytes, (object, alignment, bytes))               \
	X(void *, memalign, (size_t alignment, size_t bytes), bytes, (alignment, bytes))                                         \
	X(void *, valloc, (size_t bytes), bytes, (bytes))                                                                        \
	X(void *, pvalloc, (size_t bytes), bytes, (bytes))                                                                       \
	X(void *, _Znwm, (size_t bytes), bytes, (bytes))                                                                         \
	X(void *, _Znam, (size_t bytes), bytes, (bytes))                                                                         \
	X(void *, _ZnwmRKSt9nothrow_t, (size_t bytes, const void *nothrow), bytes, (bytes, nothrow))                             \
	X(void *, _ZnamRKSt9nothrow_t, (size_t bytes, const void *nothrow), bytes, (bytes, nothrow))                             \
	X(void *, _ZnwmSt11align_val_t, (size_t bytes, size_t alignment), bytes, (bytes, alignment))                             \
	X(void *, _ZnamSt11align_val_t, (size_t bytes, size_t alignment), bytes, (bytes, alignment))                             \
	X(void *, _ZnwmSt11align_val_tRKSt9nothrow_t, (size_t bytes, size_t alignment, const void *nothrow), bytes,              \
	  (bytes, alignment, nothrow))                                                                                           \
	X(void *, _ZnamSt11align_val_tRKSt9nothrow_t, (size_t bytes, size_t alignment, const void *nothrow), bytes,              \
	  (bytes, alignment, nothrow))
/* X(name, parameters, arguments) */
#define FREEING(X)                                                                                                               \
	X(free, (void *object), (object))                                                                                        \
	X(_ZdlPv, (void *object), (object))                                                                                      \
	X(_ZdaPv, (void *object), (object))                                                                                      \
	X(_ZdlPvm, (void *object, size_t bytes), (object, bytes))                                                                \
	X(_ZdaPvm, (void *object, size_t bytes), (object, bytes))                                                                \
	X(_ZdlPvRKSt9nothrow_t, (void *object, const void *nothrow), (object, nothrow))                                          \
	X(_ZdaPvRKSt9nothrow_t, (void *object, const void *nothrow), (object, nothrow))                                          \
	X(_ZdlPvSt11align_val_t, (void *object, size_t alignment), (object, alignment))                                          \
	X(_ZdaPvSt11align_val_t, (void *object, size_t alignment), (object, alignment))                                          \
	X(_ZdlPvmSt11align_val_t, (void *object, size_t bytes, size_t alignment), (object, bytes, alignment))                    \
	X(_ZdaPvmSt11align_val_t, (void *object, size_t bytes, size_t alignment), (object, bytes, alignment))                    \
	X(_ZdlPvSt11align_val_tRKSt9nothrow_t, (void *object, size_t alignment, const void *nothrow),                            \
	  (object, alignment, nothrow))                                                                                          \
	X(_ZdaPvSt11align_val_tRKSt9nothrow_t, (void *object, size_t alignment, const void *nothrow),                            \
	  (object, alignment, nothrow))

struct allocator {
	void *(*realloc)(void *, size_t);
#define X(type, name, parameters, bytes, arguments) type(*name) parameters;
	ALLOCATING(X)
#undef X
#define X(name, parameters, arguments) void(*name) parameters;
	FREEING(X)
#undef X
};

/* Of the next allocator; found when one is called, which may be before the constructor. */
static void find(struct allocator *into, void *library);
static struct allocator next;

#define X(type, name, parameters, bytes, arguments)  \
	type name parameters;                        \
	static type first_##name parameters          \
	{                                            \
		find(&next, RTLD_NEXT);              \
		if (next.name == first_##name)       \
			abort();                     \
		return next.name arguments;          \
	}
ALLOCATING(X)
X(void *, realloc, (void *object, size_t bytes), bytes, (object, bytes))
#undef X
#define X(name, parameters, arguments)               \
	void name parameters;                        \
	static void first_##name parameters          \
	{                                            \
		find(&next, RTLD_NEXT);              \
		if (next.name == first_##name)       \
			abort();                     \
		next.name arguments;                 \
	}
FREEING(X)
#undef X

static struct allocator next = {
	.realloc = first_realloc,
#define X(type, name, parameters, bytes, arguments) .name = first_##name,
	ALLOCATING(X)
#undef X
#define X(name, parameters, arguments) .name = first_##name,
	FREEING(X)
#undef X
};

/* What the library does not have stays as it is. */
__attribute__((noinline)) static void find(struct allocator *into, void *library)
{
	void *found;

#define FIND(name)                                                   \
	found = dlsym(library, #name);                               \
	if (found)                                                   \
		into->name = (__typeof__(into->name))found;
	FIND(realloc)
	FIND(free)
#define X(type, name, parameters, bytes, arguments) FIND(name)
	ALLOCATING(X)
#undef X
#define X(name, parameters, arguments) FIND(name)
	FREEING(X)
#undef X
#undef FIND
}

/* Finds the next allocator and the topology; NULL without one, having said that the program runs as without this library. */
static homenode *open_before(const char *allocator)
{
	char why[HOMENODE_ERROR_BYTES];

	find(&next, RTLD_NEXT);
	homenode *opened = homenode_open(NULL, why);
	if (!opened)
		say("%s; %s runs as without", why, allocator);
	return opened;
}

/* What a thread knows of itself. */
static __thread __attribute__((tls_model("initial-exec"))) struct {
	size_t left;                  /* bytes until it looks again */
	uintptr_t begin;              /* of its node's stretch */
	const struct allocator *here; /* from which it allocates */
	unsigned node;
} own = { .here = &next, .node = NOWHERE };

/* Finds the thread's node; first of all sets `left`, before anything that could allocate. */
static void look(void);
/* Frees an object of another node; false if it is of none, so that the thread's own allocator has to. */
static bool free_elsewhere(void *object);
/* As realloc() for an object of another node; false if it is of none. */
static bool realloc_elsewhere(void *object, size_t bytes, void **moved);

/* The usual case, in as little as possible: of the thread's own node. */
static inline bool is_own(const void *object)
{
	return (uintptr_t)object - own.begin < STRETCH;
}

/* Whether a product of sizes is large only matters when it does not overflow. */
static inline void count_allocated(size_t bytes)
{
	if (UNLIKELY(bytes >= own.left))
		look();
	else
		own.left -= bytes;
}

#define X(type, name, parameters, bytes, arguments)                      \
	EXPORT type name parameters                                      \
	{                                                                \
		count_allocated(bytes);                                  \
		return own.here->name arguments;                         \
	}
ALLOCATING(X)
#undef X
#define X(name, parameters, arguments)                                   \
	EXPORT void name parameters                                      \
	{                                                                \
		if (UNLIKELY(!is_own(object) && free_elsewhere(object))) \
			return;                                          \
		own.here->name arguments;                                \
	}
FREEING(X)
#undef X

EXPORT void *realloc(void *object, size_t bytes)
{
	void *moved;

	count_allocated(bytes);
	if (UNLIKELY(!is_own(object) && realloc_elsewhere(object, bytes, &moved)))
		return moved;
	return own.here->realloc(object, bytes);
}

#endif
