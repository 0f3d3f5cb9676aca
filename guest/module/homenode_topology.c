// SPDX-License-Identifier: GPL-2.0
/*
 * The guest's kernel follows its host: each CPU belongs to the virtual node whose memory is nearest to where its vCPU runs now.
 *
 * The host says what is so on a page in the memory of an ivshmem device. Of each good version the module
 *  - moves the CPUs whose node is another one now, by one of two methods, each CPU wholly or not at all;
 *  - writes what came of it to a page of its own, in this kernel's numbers, which programs map from /dev/homenode-topology.
 *
 * What belongs together, per CPU: the per-CPU node number (page allocator, getcpu(2)), the CPU masks of the nodes, the segment limit
 * and TSC_AUX that the vDSO's getcpu reads, which nodes have CPUs, links in sysfs, and the scheduler's NUMA masks and domains.
 * Changing all but the scheduler's part is what makes the next CPU hotplug end in a soft lockup.
 *
 *  kbat  changes everything in place, as CPU hotplug would. Needs functions that the kernel does not export.
 *  hp    takes the CPU offline and brings it online, and changes its node on the way up. Needs exported functions only, but
 *        cannot move CPU 0, and programs lose their affinity to the CPU.
 *
 * In both, a CPU that comes online later gets its node from here, since the kernel would read it from ACPI's tables again.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/acpi.h>
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/kprobes.h>
#include <linux/ktime.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/nodemask.h>
#include <linux/pci.h>
#include <linux/poll.h>
#include <linux/smp.h>
#include <linux/topology.h>
#include <linux/version.h>
#include <linux/workqueue.h>
#include <asm/desc.h>
#include <asm/msr.h>
#include <asm/smp.h>

#include "homenode_topology.h"

#define VCPUS HOMENODE_TOPOLOGY_VCPUS_MAX
#define NODES HOMENODE_TOPOLOGY_VNODES_MAX
#define NONE HOMENODE_TOPOLOGY_NONE
/* Looking even so where the device has interrupts: a host's agent that was restarted has lost the doorbell. */
#define SLOW_POLL_MS 1000

static char *method = "auto";
module_param(method, charp, 0444);
MODULE_PARM_DESC(method, "auto (kbat if the kernel has all that it takes), kbat or hp");
static unsigned int poll_ms = 100;
module_param(poll_ms, uint, 0444);
MODULE_PARM_DESC(poll_ms, "how often to look for a new version where the device has no interrupts");
static bool untested;
module_param(untested, bool, 0444);
MODULE_PARM_DESC(untested, "load into a kernel that this module was not tested with");

/* --- What is known, all under `lock` --- */

static DEFINE_MUTEX(lock);
static int boot_node[VCPUS];   /* before the module came; NUMA_NO_NODE of CPUs that were not there */
static int wanted_node[VCPUS]; /* NUMA_NO_NODE: as the kernel has it */
static struct homenode_topology host; /* the last good version */
static bool have_host;
static struct homenode_topology incoming;

static struct {
	u64 updates, refused, torn, moves, failed_moves, apply_us_last, apply_us_total;
	char last_error[160];
} counters;

#define complain(...)                                                                        \
	do {                                                                                 \
		snprintf(counters.last_error, sizeof(counters.last_error), __VA_ARGS__);     \
		pr_warn_ratelimited("%s\n", counters.last_error);                            \
	} while (0)

/* --- The page that programs see --- */

static struct homenode_topology *own;
static u64 own_sequence; /* never read back from the page */
static DECLARE_WAIT_QUEUE_HEAD(changed);

static void publish(void)
{
	static struct homenode_topology next;
	unsigned int cpu, node, other, nodes = 1;

	memset(&next, 0, sizeof(next));
	memset(next.vcpu_pnode, NONE, sizeof(next.vcpu_pnode));
	memset(next.vcpu_vnode, NONE, sizeof(next.vcpu_vnode));
	memset(next.vnode_pnode, NONE, sizeof(next.vnode_pnode));
	next.magic = HOMENODE_TOPOLOGY_MAGIC;
	next.layout = HOMENODE_TOPOLOGY_LAYOUT;
	next.size = sizeof(next);
	next.vcpu_count = nr_cpu_ids;
	for_each_node_state(node, N_MEMORY)
		nodes = max(nodes, node + 1);
	for_each_possible_cpu(cpu) {
		unsigned int vcpu = per_cpu(x86_cpu_to_apicid, cpu);

		int here = cpu_to_node(cpu);

		/* Of one that is offline: where it will be when it comes. */
		if (!cpu_online(cpu) && wanted_node[cpu] != NUMA_NO_NODE)
			here = wanted_node[cpu];
		next.vcpu_vnode[cpu] = here;
		nodes = max_t(unsigned int, nodes, here + 1);
		if (have_host && vcpu < host.vcpu_count)
			next.vcpu_pnode[cpu] = host.vcpu_pnode[vcpu];
	}
	next.vnode_count = nodes;
	if (have_host) {
		next.pnode_count = host.pnode_count;
		memcpy(next.distance, host.distance, sizeof(next.distance));
		for (other = 0; other < host.vnode_count; other++) {
			int here = pxm_to_node(other);

			if (here >= 0 && here < nodes)
				next.vnode_pnode[here] = host.vnode_pnode[other];
		}
	} else {
		/* The static view: each node's memory is where it says. */
		next.pnode_count = nodes;
		for (node = 0; node < nodes; node++) {
			next.vnode_pnode[node] = node_state(node, N_MEMORY) ? node : NONE;
			for (other = 0; other < nodes; other++)
				next.distance[node][other] =
					node == other ? HOMENODE_TOPOLOGY_LOCAL :
							clamp(node_distance(node, other), (int)HOMENODE_TOPOLOGY_LOCAL, 255);
		}
	}
	own_sequence += 2;
	next.sequence = own_sequence - 1;
	WRITE_ONCE(own->sequence, own_sequence - 1);
	smp_wmb();
	memcpy(own, &next, sizeof(next));
	smp_wmb();
	WRITE_ONCE(own->sequence, own_sequence);
	wake_up_interruptible(&changed);
}

/* A file remembers the version that was read from it last. */
static int own_open(struct inode *inode, struct file *file)
{
	file->private_data = (void *)(uintptr_t)READ_ONCE(own->sequence);
	return 0;
}

static bool is_news(struct file *file)
{
	return READ_ONCE(own->sequence) != (u64)(uintptr_t)file->private_data;
}

static ssize_t own_read(struct file *file, char __user *buffer, size_t bytes, loff_t *at)
{
	u64 sequence;

	if (bytes < sizeof(sequence))
		return -EINVAL;
	if (!is_news(file)) {
		if (file->f_flags & O_NONBLOCK)
			return -EAGAIN;
		if (wait_event_interruptible(changed, is_news(file)))
			return -ERESTARTSYS;
	}
	sequence = READ_ONCE(own->sequence);
	file->private_data = (void *)(uintptr_t)sequence;
	return copy_to_user(buffer, &sequence, sizeof(sequence)) ? -EFAULT : (ssize_t)sizeof(sequence);
}

static __poll_t own_poll(struct file *file, poll_table *table)
{
	poll_wait(file, &changed, table);
	return is_news(file) ? EPOLLIN | EPOLLRDNORM : 0;
}

static int own_mmap(struct file *file, struct vm_area_struct *area)
{
	if (area->vm_flags & VM_WRITE)
		return -EPERM;
	if (area->vm_pgoff || vma_pages(area) > HOMENODE_TOPOLOGY_BYTES >> PAGE_SHIFT)
		return -EINVAL;
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_clear(area, VM_MAYWRITE);
#else
	area->vm_flags &= ~VM_MAYWRITE;
#endif
	return remap_pfn_range(area, area->vm_start, virt_to_phys(own) >> PAGE_SHIFT, area->vm_end - area->vm_start,
			       area->vm_page_prot);
}

static const struct file_operations own_operations = {
	.owner = THIS_MODULE,
	.open = own_open,
	.read = own_read,
	.poll = own_poll,
	.mmap = own_mmap,
	.llseek = noop_llseek,
};

/* --- Moving a CPU --- */

/* All but the scheduler's part of it, on the CPU itself. */
static void set_node_here(void *node_pointer)
{
	int cpu = smp_processor_id(), node = *(int *)node_pointer, before = cpu_to_node(cpu);
	unsigned long encoded = vdso_encode_cpunode(cpu, node);
	struct desc_struct limit = {};

	set_numa_node(node);
	per_cpu(x86_cpu_to_node_map, cpu) = node;
	cpumask_clear_cpu(cpu, node_to_cpumask_map[before]);
	cpumask_set_cpu(cpu, node_to_cpumask_map[node]);
	node_set_state(node, N_CPU);
	if (before != node && cpumask_empty(node_to_cpumask_map[before]))
		node_clear_state(before, N_CPU);
	/* As the kernel's setup_getcpu() does. */
	if (boot_cpu_has(X86_FEATURE_RDTSCP) || boot_cpu_has(X86_FEATURE_RDPID))
		wrmsrl(MSR_TSC_AUX, encoded);
	limit.limit0 = encoded;
	limit.limit1 = encoded >> 16;
	limit.type = 5;
	limit.dpl = 3;
	limit.s = 1;
	limit.p = 1;
	limit.d = 1;
	write_gdt_entry(get_cpu_gdt_rw(cpu), GDT_ENTRY_CPUNODE, &limit, DESCTYPE_S);
}

/*
 * A CPU comes online: after x86 has read its node from ACPI's tables, before the scheduler uses it. Also where that is the node
 * wanted: what the vDSO reads was set earlier, to the node that the CPU had when it went.
 */
static int cpu_comes(unsigned int cpu)
{
	int node = cpu < VCPUS ? READ_ONCE(wanted_node[cpu]) : NUMA_NO_NODE;

	if (node != NUMA_NO_NODE) {
		preempt_disable();
		set_node_here(&node);
		preempt_enable();
	}
	return 0;
}

/* What kbat needs. The prototypes are those of the kernels that it was tested with. */
static struct {
	void (*sched_update_numa)(int cpu, bool online);
	int (*sched_domains_numa_masks_set)(unsigned int cpu);
	int (*sched_domains_numa_masks_clear)(unsigned int cpu);
	void (*rebuild_sched_domains)(void);
	int (*register_cpu_under_node)(unsigned int cpu, unsigned int node);
	int (*unregister_cpu_under_node)(unsigned int cpu, unsigned int node);
	bool *x86_topology_update;
} kernel;
static bool in_place; /* kbat */
static char method_reason[120];

static bool is_tested(void)
{
	u32 version = LINUX_VERSION_CODE >> 8;

	return version == KERNEL_VERSION(6, 1, 0) >> 8 || version == KERNEL_VERSION(6, 12, 0) >> 8;
}

/* Nothing of a CPU is changed in here, so that what is not there is noticed before anything is. */
static int find_symbols(void)
{
	unsigned long (*lookup)(const char *name);
	struct kprobe probe = { .symbol_name = "kallsyms_lookup_name" };
	const struct {
		const char *name;
		void **place;
	} symbols[] = {
		{ "sched_update_numa", (void **)&kernel.sched_update_numa },
		{ "sched_domains_numa_masks_set", (void **)&kernel.sched_domains_numa_masks_set },
		{ "sched_domains_numa_masks_clear", (void **)&kernel.sched_domains_numa_masks_clear },
		{ "rebuild_sched_domains", (void **)&kernel.rebuild_sched_domains },
		{ "register_cpu_under_node", (void **)&kernel.register_cpu_under_node },
		{ "unregister_cpu_under_node", (void **)&kernel.unregister_cpu_under_node },
		{ "x86_topology_update", (void **)&kernel.x86_topology_update },
	};
	int at, error;

	if (!is_tested()) {
		snprintf(method_reason, sizeof(method_reason), "kbat was not tested with this kernel, only with 6.1 and 6.12");
		return -EOPNOTSUPP;
	}
#ifdef X86_FEATURE_IBT
	/* Functions whose address the kernel itself does not take may not be called by address there. */
	if (boot_cpu_has(X86_FEATURE_IBT)) {
		snprintf(method_reason, sizeof(method_reason), "indirect branch tracking is on (kernel option ibt=off)");
		return -EOPNOTSUPP;
	}
#endif
	error = register_kprobe(&probe);
	if (error) {
		snprintf(method_reason, sizeof(method_reason), "symbol kallsyms_lookup_name: not found (%d)", error);
		return -ENOENT;
	}
	lookup = (void *)probe.addr;
	unregister_kprobe(&probe);
	for (at = 0; at < ARRAY_SIZE(symbols); at++) {
		*symbols[at].place = (void *)lookup(symbols[at].name);
		if (!*symbols[at].place) {
			snprintf(method_reason, sizeof(method_reason), "symbol %s: not found", symbols[at].name);
			return -ENOENT;
		}
	}
	snprintf(method_reason, sizeof(method_reason), "all symbols found");
	return 0;
}

/* Returns how many CPUs moved. No CPU comes or goes in between, and no domain is built of half of it. */
static unsigned int move_in_place(const int *target)
{
	unsigned int cpu, moved = 0;

	cpu_hotplug_disable();
	for_each_online_cpu(cpu) {
		int node = target[cpu];

		if (node == NUMA_NO_NODE || node == cpu_to_node(cpu))
			continue;
		WRITE_ONCE(wanted_node[cpu], node);
		kernel.unregister_cpu_under_node(cpu, cpu_to_node(cpu));
		kernel.sched_update_numa(cpu, false);
		kernel.sched_domains_numa_masks_clear(cpu);
		smp_call_function_single(cpu, set_node_here, &node, 1);
		kernel.sched_update_numa(cpu, true);
		kernel.sched_domains_numa_masks_set(cpu);
		kernel.register_cpu_under_node(cpu, node);
		moved++;
	}
	if (moved) {
		/* Otherwise domains over the same CPUs are taken to be the same. */
		*kernel.x86_topology_update = true;
		kernel.rebuild_sched_domains();
	}
	cpu_hotplug_enable();
	return moved;
}

static bool bring_back(unsigned int cpu)
{
	int tries, error = 0;

	for (tries = 0; tries < 5; tries++) {
		error = add_cpu(cpu);
		if (!error)
			return true;
		msleep(20);
	}
	complain("CPU %u went offline to move and does not come back: error %d", cpu, error);
	return false;
}

static unsigned int move_by_hotplug(const int *target)
{
	unsigned int cpu, moved = 0;

	for_each_possible_cpu(cpu) {
		int node = target[cpu], before = wanted_node[cpu], error;

		if (!cpu_online(cpu) || node == NUMA_NO_NODE || node == cpu_to_node(cpu))
			continue;
		error = remove_cpu(cpu);
		if (error) {
			counters.failed_moves++;
			complain("CPU %u stays on node %d: the kernel does not take it offline (error %d)%s", cpu, cpu_to_node(cpu),
				 error, cpu == 0 ? "; moving CPU 0 needs the method kbat" : "");
			continue;
		}
		WRITE_ONCE(wanted_node[cpu], node);
		if (!bring_back(cpu)) {
			WRITE_ONCE(wanted_node[cpu], before);
			counters.failed_moves++;
			continue;
		}
		moved++;
	}
	return moved;
}

static void move_cpus(const int *target)
{
	ktime_t begin = ktime_get();
	unsigned int cpu, moved = in_place ? move_in_place(target) : move_by_hotplug(target);

	/* Those that are offline get theirs when they come. */
	for_each_possible_cpu(cpu)
		if (!cpu_online(cpu) && target[cpu] != NUMA_NO_NODE)
			WRITE_ONCE(wanted_node[cpu], target[cpu]);
	counters.moves += moved;
	counters.apply_us_last = ktime_us_delta(ktime_get(), begin);
	counters.apply_us_total += counters.apply_us_last;
}

static void restore_boot(void)
{
	unsigned int cpu;

	have_host = false;
	move_cpus(boot_node);
	for_each_possible_cpu(cpu) {
		if (boot_node[cpu] == NUMA_NO_NODE || cpu_to_node(cpu) == boot_node[cpu])
			continue;
		if (cpu_online(cpu))
			pr_warn("CPU %u stays on node %d, at boot it was on %d\n", cpu, cpu_to_node(cpu), boot_node[cpu]);
		else /* x86 begins with this one when the CPU comes, and we may be gone by then */
			per_cpu(x86_cpu_to_node_map, cpu) = boot_node[cpu];
	}
	publish();
}

/* --- The host's page --- */

static struct {
	struct pci_dev *device;
	struct homenode_topology *page;
	bool has_interrupt;
	u64 seen;
	bool have_seen;
} feed;

/* Whether a version that is good in itself is possible in this guest; says what is not. */
static bool fits_guest(const struct homenode_topology *copy)
{
	unsigned int vnode;

	for (vnode = 0; vnode < copy->vnode_count; vnode++) {
		int node = pxm_to_node(vnode);

		if (copy->vnode_pnode[vnode] == NONE)
			continue;
		if (node < 0 || !node_state(node, N_MEMORY)) {
			complain("the page has memory of virtual node %u, which this guest has not", vnode);
			return false;
		}
	}
	return true;
}

static void look_at_page(void)
{
	static int target[VCPUS];
	enum homenode_topology_verdict verdict;
	u64 sequence = homenode_topology_sequence(feed.page);
	unsigned int cpu, vnode;

	if (feed.have_seen && sequence == feed.seen)
		return;
	verdict = homenode_topology_read(feed.page, &incoming);
	/* A bad page is not looked at again before it is written. */
	feed.seen = verdict == HOMENODE_TOPOLOGY_GOOD ? incoming.sequence : sequence;
	feed.have_seen = true;
	if (verdict != HOMENODE_TOPOLOGY_GOOD) {
		counters.torn += verdict == HOMENODE_TOPOLOGY_TORN;
		counters.refused += verdict != HOMENODE_TOPOLOGY_TORN;
		complain("the host's page is refused: %s", homenode_topology_error(verdict));
		return;
	}
	if (!fits_guest(&incoming)) {
		counters.refused++;
		return;
	}
	for_each_possible_cpu(cpu) {
		u32 present = NONE;

		/* In the page's numbers. */
		for (vnode = 0; vnode < incoming.vnode_count; vnode++)
			if (pxm_to_node(vnode) == cpu_to_node(cpu))
				present = vnode;
		vnode = homenode_topology_node(&incoming, per_cpu(x86_cpu_to_apicid, cpu), present);
		target[cpu] = vnode < incoming.vnode_count ? pxm_to_node(vnode) : NUMA_NO_NODE;
		if (target[cpu] != NUMA_NO_NODE && !node_state(target[cpu], N_MEMORY))
			target[cpu] = NUMA_NO_NODE;
	}
	host = incoming;
	have_host = true;
	move_cpus(target);
	counters.updates++;
	publish();
}

static void look(struct work_struct *work);
static DECLARE_DELAYED_WORK(looking, look);

static void look(struct work_struct *work)
{
	mutex_lock(&lock);
	if (feed.device) {
		look_at_page();
		queue_delayed_work(system_long_wq, &looking,
				   msecs_to_jiffies(feed.has_interrupt ? SLOW_POLL_MS : max(poll_ms, 1u)));
	}
	mutex_unlock(&lock);
}

static irqreturn_t doorbell(int irq, void *unused)
{
	mod_delayed_work(system_long_wq, &looking, 0);
	return IRQ_HANDLED;
}

/* A device that came with a page of ours; others (this id is not ours alone) are left to others. */
static int feed_comes(struct pci_dev *device, const struct pci_device_id *id)
{
	void *page;
	int error;

	error = pcim_enable_device(device);
	if (error)
		return error;
	if (pci_resource_len(device, 2) < HOMENODE_TOPOLOGY_BYTES)
		return -ENODEV;
	error = pci_request_region(device, 2, KBUILD_MODNAME);
	if (error) {
		dev_err(&device->dev, "its memory is in use (by a program that maps resource2?): error %d\n", error);
		return error;
	}
	page = memremap(pci_resource_start(device, 2), HOMENODE_TOPOLOGY_BYTES, MEMREMAP_WB);
	if (!page) {
		error = -ENOMEM;
		goto release;
	}
	if (READ_ONCE(((struct homenode_topology *)page)->magic) != HOMENODE_TOPOLOGY_MAGIC) {
		dev_info(&device->dev, "no topology page\n");
		error = -ENODEV;
		goto unmap;
	}
	mutex_lock(&lock);
	if (feed.device) {
		mutex_unlock(&lock);
		dev_warn(&device->dev, "a second topology page: not used\n");
		error = -EBUSY;
		goto unmap;
	}
	feed.page = page;
	feed.have_seen = false;
	feed.has_interrupt = false;
	feed.device = device;
	mutex_unlock(&lock);
	pci_set_master(device);
	if (pci_alloc_irq_vectors(device, 1, 1, PCI_IRQ_MSIX) == 1) {
		error = request_irq(pci_irq_vector(device, 0), doorbell, 0, KBUILD_MODNAME, device);
		if (error)
			pci_free_irq_vectors(device);
		else
			feed.has_interrupt = true;
	}
	dev_info(&device->dev, "following its topology page, method %s, %s\n", in_place ? "kbat" : "hp",
		 feed.has_interrupt ? "by interrupt" : "by polling");
	mod_delayed_work(system_long_wq, &looking, 0);
	return 0;
unmap:
	memunmap(page);
release:
	pci_release_region(device, 2);
	return error;
}

/* The feed was unplugged, or the module goes: back to the static view. */
static void feed_goes(struct pci_dev *device)
{
	if (feed.has_interrupt) {
		free_irq(pci_irq_vector(device, 0), device);
		pci_free_irq_vectors(device);
	}
	mutex_lock(&lock);
	feed.device = NULL;
	mutex_unlock(&lock);
	cancel_delayed_work_sync(&looking);
	mutex_lock(&lock);
	memunmap(feed.page);
	feed.page = NULL;
	restore_boot();
	mutex_unlock(&lock);
	pci_release_region(device, 2);
}

static const struct pci_device_id feed_ids[] = { { PCI_DEVICE(0x1af4, 0x1110) }, {} };
MODULE_DEVICE_TABLE(pci, feed_ids);

static struct pci_driver feed_driver = {
	.name = KBUILD_MODNAME,
	.id_table = feed_ids,
	.probe = feed_comes,
	.remove = feed_goes,
};

/* --- /sys/class/misc/homenode-topology --- */

#define SHOW(name, format, ...)                                                                           \
	static ssize_t name##_show(struct device *device, struct device_attribute *attribute, char *buffer) \
	{                                                                                                 \
		ssize_t length;                                                                           \
		mutex_lock(&lock);                                                                        \
		length = sysfs_emit(buffer, format "\n", __VA_ARGS__);                                    \
		mutex_unlock(&lock);                                                                      \
		return length;                                                                            \
	}                                                                                                 \
	static DEVICE_ATTR_RO(name)

SHOW(status, "%s", have_host ? "following" : feed.device ? "waiting for a good page" : "static, no topology page");
SHOW(method, "%s", in_place ? "kbat" : "hp");
SHOW(method_reason, "%s", method_reason);
SHOW(version, "%llu", have_host ? host.sequence : 0);
SHOW(updates, "%llu", counters.updates);
SHOW(refused, "%llu", counters.refused);
SHOW(torn, "%llu", counters.torn);
SHOW(moves, "%llu", counters.moves);
SHOW(failed_moves, "%llu", counters.failed_moves);
SHOW(apply_us_last, "%llu", counters.apply_us_last);
SHOW(apply_us_total, "%llu", counters.apply_us_total);
SHOW(last_error, "%s", counters.last_error);

static struct attribute *own_attrs[] = {
	&dev_attr_status.attr,	      &dev_attr_method.attr,	    &dev_attr_method_reason.attr,  &dev_attr_version.attr,
	&dev_attr_updates.attr,	      &dev_attr_refused.attr,	    &dev_attr_torn.attr,	   &dev_attr_moves.attr,
	&dev_attr_failed_moves.attr,  &dev_attr_apply_us_last.attr, &dev_attr_apply_us_total.attr, &dev_attr_last_error.attr,
	NULL,
};
ATTRIBUTE_GROUPS(own);

static struct miscdevice own_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "homenode-topology",
	.mode = 0444,
	.fops = &own_operations,
	.groups = own_groups,
};

/* --- Coming and going --- */

/* What this guest must be; says what it is not. */
static int check_guest(void)
{
	unsigned int cpu, node;

	if (!is_tested() && !untested) {
		pr_err("this kernel is neither 6.1 nor 6.12, with which the module was tested (untested=1 loads it all the same)\n");
		return -EOPNOTSUPP;
	}
	if (nr_cpu_ids > VCPUS) {
		pr_err("%u possible CPUs: a topology page holds %u\n", nr_cpu_ids, VCPUS);
		return -E2BIG;
	}
	for_each_node_state(node, N_POSSIBLE)
		if (node >= NODES && node_state(node, N_MEMORY)) {
			pr_err("node %u: a topology page holds %u\n", node, NODES);
			return -E2BIG;
		}
	if (num_node_state(N_MEMORY) < 2) {
		pr_err("this guest has one node with memory: start it with a virtual node for each host node it may use\n");
		return -ENODEV;
	}
	/* The scheduler's domains of a package must not span nodes: it takes the kernel down. */
	for_each_online_cpu(cpu)
		if (cpumask_weight(topology_core_cpumask(cpu)) > 1) {
			pr_err("CPU %u shares its socket: start the guest with sockets=N,cores=1,threads=1\n", cpu);
			return -EOPNOTSUPP;
		}
	return 0;
}

static int choose_method(void)
{
	int error;

	if (strcmp(method, "hp") == 0) {
		snprintf(method_reason, sizeof(method_reason), "asked for");
		return 0;
	}
	if (strcmp(method, "auto") != 0 && strcmp(method, "kbat") != 0) {
		pr_err("method=%s: auto, kbat or hp\n", method);
		return -EINVAL;
	}
	error = find_symbols();
	in_place = !error;
	if (error && strcmp(method, "kbat") == 0) {
		pr_err("method kbat is not possible: %s\n", method_reason);
		return error;
	}
	return 0;
}

static int hotplug_state;

static int __init come(void)
{
	unsigned int cpu;
	int error = check_guest();

	if (!error)
		error = choose_method();
	if (error)
		return error;
	own = alloc_pages_exact(HOMENODE_TOPOLOGY_BYTES, GFP_KERNEL | __GFP_ZERO);
	if (!own)
		return -ENOMEM;
	for (cpu = 0; cpu < VCPUS; cpu++) {
		boot_node[cpu] = cpu < nr_cpu_ids && cpu_possible(cpu) ? cpu_to_node(cpu) : NUMA_NO_NODE;
		wanted_node[cpu] = NUMA_NO_NODE;
	}
	mutex_lock(&lock);
	publish();
	mutex_unlock(&lock);
	error = cpuhp_setup_state_nocalls(CPUHP_AP_ONLINE_DYN, KBUILD_MODNAME ":online", cpu_comes, NULL);
	if (error < 0)
		goto free_page;
	hotplug_state = error;
	error = misc_register(&own_device);
	if (error)
		goto remove_state;
	error = pci_register_driver(&feed_driver);
	if (error)
		goto remove_device;
	pr_info("loaded: method %s (%s)\n", in_place ? "kbat" : "hp", method_reason);
	return 0;
remove_device:
	misc_deregister(&own_device);
remove_state:
	cpuhp_remove_state_nocalls(hotplug_state);
free_page:
	free_pages_exact(own, HOMENODE_TOPOLOGY_BYTES);
	return error;
}

static void __exit go(void)
{
	pci_unregister_driver(&feed_driver);
	misc_deregister(&own_device);
	cpuhp_remove_state_nocalls(hotplug_state);
	free_pages_exact(own, HOMENODE_TOPOLOGY_BYTES);
	pr_info("gone: CPUs are on the nodes that they had before\n");
}

module_init(come);
module_exit(go);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Moves CPUs between virtual nodes as the host moves vCPUs");
MODULE_VERSION("0.2.0");
