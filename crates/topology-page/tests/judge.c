/* SPDX-License-Identifier: Apache-2.0 */
/* What the C header makes of pages: reads them one after the other, and writes a line for each: the verdict, and, if it is good,
 * the virtual node of each vCPU that is in the first one at present. With "layout", writes where everything is instead. */
#include <stdio.h>
#include <string.h>

#include "homenode_topology.h"

#define AT(field) printf("%s %zu\n", #field, __builtin_offsetof(struct homenode_topology, field))

int main(int count, char **arguments)
{
	static struct homenode_topology page, copy;

	if (count > 1 && strcmp(arguments[1], "layout") == 0) {
		AT(magic);
		AT(layout);
		AT(size);
		AT(sequence);
		AT(vcpu_count);
		AT(vnode_count);
		AT(pnode_count);
		AT(reserved);
		AT(vcpu_pnode);
		AT(vcpu_vnode);
		AT(vnode_pnode);
		AT(distance);
		printf("bytes %zu\nmapped %u\nmagic %llu\n", sizeof(page), HOMENODE_TOPOLOGY_BYTES,
		       (unsigned long long)HOMENODE_TOPOLOGY_MAGIC);
		return 0;
	}
	while (fread(&page, sizeof(page), 1, stdin) == 1) {
		enum homenode_topology_verdict verdict = homenode_topology_read(&page, &copy);

		printf("%d", verdict);
		for (__u32 vcpu = 0; verdict == HOMENODE_TOPOLOGY_GOOD && vcpu < copy.vcpu_count; vcpu++)
			printf(" %u", homenode_topology_node(&copy, vcpu, 0));
		printf("\n");
	}
	return 0;
}
