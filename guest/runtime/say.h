/* SPDX-License-Identifier: Apache-2.0 */
/* One line to standard error, without allocating. */
#ifndef HOMENODE_SAY_H
#define HOMENODE_SAY_H

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define say(...)                                                                          \
	do {                                                                              \
		char line_[768] = "homenode: ";                                           \
		size_t at_ = strlen(line_);                                               \
		snprintf(line_ + at_, sizeof(line_) - at_ - 1, __VA_ARGS__);              \
		strcat(line_, "\n");                                                      \
		if (write(STDERR_FILENO, line_, strlen(line_)) < 0) {                     \
			/* nobody is there to be told */                                  \
		}                                                                         \
	} while (0)

#endif
