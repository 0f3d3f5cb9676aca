/* SPDX-License-Identifier: Apache-2.0 */
/* An allocation benchmark: threads that replace objects at random in tables of their own, of the sizes that servers use, and write
 * to what they get. Says how many million objects a second that makes. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { THREADS = 2, LIVE = 20000, OBJECTS = 2000000 };

static void *replace(void *seed)
{
	uint64_t state = (uintptr_t)seed;
	char **live = calloc(LIVE, sizeof(*live));

	for (int at = 0; at < OBJECTS; at++) {
		state = state * 6364136223846793005u + 1442695040888963407u;
		unsigned slot = (unsigned)(state >> 33) % LIVE, draw = (unsigned)(state >> 20) & 1023;
		/* Mostly small, up to 16 KiB. */
		size_t bytes = draw < 900 ? 16 + draw : draw < 1015 ? 16 * draw / 8 : 16384;

		free(live[slot]);
		live[slot] = malloc(bytes);
		memset(live[slot], 1, bytes < 256 ? bytes : 256);
	}
	for (int at = 0; at < LIVE; at++)
		free(live[at]);
	free(live);
	return NULL;
}

int main(void)
{
	struct timespec begin, end;
	pthread_t threads[THREADS];

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
	for (uintptr_t at = 0; at < THREADS; at++)
		pthread_create(&threads[at], NULL, replace, (void *)(at + 1));
	for (int at = 0; at < THREADS; at++)
		pthread_join(threads[at], NULL);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
	printf("%.4f\n", THREADS * (double)OBJECTS / 1e6 / ((double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) / 1e9));
	return 0;
}
