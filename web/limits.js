// Limits above which a figure is marked: the same as in `homenode top`, which a test checks.

const LIMITS = {
  local: { warn: 0.8, bad: 0.5 },
  vmWaiting: { warn: 0.05, bad: 0.1 },
  nodeWaiting: { warn: 0.05, bad: 0.1 },
  free: { warn: 0.1, bad: 0.03 },
  controller: { warn: 0.7, bad: 0.9 },
  link: { warn: 0.5, bad: 0.8 },
};

export const LEVELS = ["fine", "warn", "bad"];
// A colour always comes with a sign.
export const SIGNS = { fine: "", warn: "▲", bad: "◆" };

export function level(which, share) {
  if (share === null || share === undefined) return "fine";
  const { warn, bad } = LIMITS[which];
  const isPast = (limit) => (bad < warn ? share < limit : share > limit);
  if (isPast(bad)) return "bad";
  return isPast(warn) ? "warn" : "fine";
}

export const worst = (...levels) => LEVELS[Math.max(...levels.map((one) => LEVELS.indexOf(one)))];

// Returns the share of a VM's vCPUs that waited, or null if it is not known.
export function waitingShare(vm) {
  if (vm.vcpus_waiting === null) return null;
  const vcpus = vm.vcpus_by_node.reduce((sum, on) => sum + on.vcpus, 0);
  return vm.vcpus_waiting / Math.max(vcpus, 1);
}

function permitLevel({ standing, quota }) {
  if (standing === "OVER") return quota ? "bad" : "warn";
  return quota ? "warn" : "fine";
}

function memoryLevel(vm) {
  const { need_bytes: need, limit_bytes: limit } = vm.memory;
  return need !== null && limit !== null && vm.memory_bytes < need ? "bad" : "fine";
}

// Returns the levels of a VM's figures.
export function ofVm(vm) {
  return {
    waiting: level("vmWaiting", waitingShare(vm)),
    local: level("local", vm.local_access_ratio),
    permit: permitLevel(vm.permit),
    memory: memoryLevel(vm),
  };
}

// Returns how much is wrong with a VM: the sum of its levels.
export const trouble = (vm) => Object.values(ofVm(vm)).reduce((sum, one) => sum + LEVELS.indexOf(one), 0);

export function ofNode(node) {
  const free = node.memory_bytes > 0 ? node.memory_free_bytes / node.memory_bytes : null;
  return {
    waiting: level("nodeWaiting", node.vcpus_waiting === null ? null : node.vcpus_waiting / Math.max(node.cpus, 1)),
    free: level("free", free),
    controller: level("controller", controllerShare(node)),
  };
}

export function controllerShare(node) {
  const { bandwidth_bytes_per_s: used, bandwidth_max_bytes_per_s: most } = node;
  return used === null || !most ? null : used / most;
}
