/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel's calls for memory policies, without libnuma. Node sets are of HOMENODE_TOPOLOGY_VNODES_MAX bits: one word. */
#ifndef HOMENODE_POLICY_H
#define HOMENODE_POLICY_H

#include <linux/mempolicy.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The kernel takes one bit less than it is told. */
#define HOMENODE_MAXNODE (8 * sizeof(unsigned long) + 1)

static inline long homenode_mbind(void *start, size_t bytes, int policy, unsigned long nodes)
{
	return syscall(SYS_mbind, start, bytes, policy, &nodes, HOMENODE_MAXNODE, 0);
}

static inline long homenode_set_policy(int policy, unsigned long nodes)
{
	return syscall(SYS_set_mempolicy, policy, &nodes, HOMENODE_MAXNODE);
}

#endif
