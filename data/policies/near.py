"""Homes for VMs whose accesses go to other nodes, those with most traffic first. Run: --policy 'exec:python3 near.py'"""
import json, sys

REMOTE, BUSY, PERIODS, PAGES = 0.8, 5e8, 3, 16384  # what is remote, bytes/s that matter, how long, pages moved in a period
remote = {}  # how many periods in a row each VM was
def plan(view):
    nodes = {node["node"]: node["usable_cpus"] for node in view["nodes"]}
    actions, core = [], {cpu["id"]: cpu["core"] for cpu in view["machine"]["cpus"]}
    size = {node: len({core[cpu] for cpu in cpus}) for node, cpus in nodes.items()}  # cores
    there = {vm["id"]: {on["node"]: on["vcpus"] for on in vm["vcpus_by_node"]} for vm in view["vms"]}
    if sum(len(vm["vcpus"]) for vm in view["vms"]) > sum(size.values()):  # vCPUs share cores, and the kernel makes room for homes
        size = {node: len(cpus) for node, cpus in nodes.items()}
        there = {vm["id"]: {vm["home"][0]: len(vm["vcpus"])} for vm in view["vms"] if vm["home"]}
    for vm in sorted(view["vms"], key=lambda vm: -(vm["bandwidth_bytes_per_s"] or 0)):
        own, count, home, local = vm["id"], len(vm["vcpus"]), vm["home"], vm["local_access_ratio"]
        is_remote = (1 if local is None else local) < REMOTE and (vm["bandwidth_bytes_per_s"] or 0) > BUSY
        remote[own] = remote.get(own, 0) + 1 if is_remote else 0
        others = {node: sum(on.get(node, 0) for vm, on in there.items() if vm != own) for node in nodes}
        room = [node for node in vm["chosen"]["home_allowed"] if others[node] + count <= size[node]]
        if remote[own] >= PERIODS and not home and room and not vm["left_alone"] and not vm["memory_fixed"]:
            home, why = [min(room, key=others.get)], f"{local:.0%} of its accesses were local"
            there[own], indices = {home[0]: count}, [vcpu["index"] for vcpu in vm["vcpus"]]
            pins = {"action": "pin-vcpus", "vcpus": indices, "cpus": nodes[home[0]]}
            actions += [{"vm": own, "why": why, "action": "set-home", "nodes": home}, {"vm": own, "why": why, **pins}]
        away = [on["node"] for on in vm["pages_by_node"] or [] if home and on["pages"] and on["node"] not in home]
        if away:
            actions.append({"vm": own, "action": "move-pages", "from": away, "to": home, "pages_max": PAGES, "why": "home"})
    return {"version": view["version"], "actions": actions}
for line in sys.stdin:
    print(json.dumps(plan(json.loads(line))), flush=True)
