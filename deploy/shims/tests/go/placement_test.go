package shims

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"go.starlark.net/starlark"
	"go.starlark.net/starlarkstruct"
)

const scriptlet = "../../../incus/placement.star"

// The names that Incus 6.0 gives a placement scriptlet, limited to those that ours uses.
var names = []string{
	"log_info", "log_warn", "log_error", "set_target", "get_cluster_member_resources", "get_cluster_member_state",
	"get_instance_resources", "get_instances", "get_cluster_members", "get_project",
}

type run struct {
	target string
	logged []string
}

// place runs the scriptlet as Incus does: compiled with these names, and called with two named arguments.
func place(t *testing.T, cpus, memory int64, keys []string, members map[string]string) run {
	source, err := os.ReadFile(scriptlet)
	if err != nil {
		t.Fatal(err)
	}
	var came run
	log := func(_ *starlark.Thread, b *starlark.Builtin, args starlark.Tuple, _ []starlark.Tuple) (starlark.Value, error) {
		came.logged = append(came.logged, fmt.Sprint(b.Name(), args))
		return starlark.None, nil
	}
	set := func(_ *starlark.Thread, b *starlark.Builtin, args starlark.Tuple, kwargs []starlark.Tuple) (starlark.Value, error) {
		return starlark.None, starlark.UnpackArgs(b.Name(), args, kwargs, "member_name", &came.target)
	}
	resources := func(_ *starlark.Thread, _ *starlark.Builtin, _ starlark.Tuple, _ []starlark.Tuple) (starlark.Value, error) {
		fields := starlark.StringDict{
			"cpu_cores":      starlark.MakeInt64(cpus),
			"memory_size":    starlark.MakeInt64(memory),
			"root_disk_size": starlark.MakeInt64(10 << 30),
		}
		return starlarkstruct.FromStringDict(starlark.String("InstanceResources"), fields), nil
	}
	env := starlark.StringDict{"get_instance_resources": starlark.NewBuiltin("get_instance_resources", resources)}
	for _, name := range names {
		switch {
		case strings.HasPrefix(name, "log_"):
			env[name] = starlark.NewBuiltin(name, log)
		case name == "set_target":
			env[name] = starlark.NewBuiltin(name, set)
		case env[name] == nil:
			env[name] = starlark.NewBuiltin(name, log)
		}
	}
	_, program, err := starlark.SourceProgram("instance_placement", source, env.Has)
	if err != nil {
		t.Fatal(err)
	}
	thread := &starlark.Thread{Name: "instance_placement"}
	globals, err := program.Init(thread, env)
	if err != nil {
		t.Fatal(err)
	}
	globals.Freeze()
	candidates := []starlark.Value{}
	for _, name := range keys {
		config := starlark.NewDict(1)
		if value, is := members[name]; is {
			_ = config.SetKey(starlark.String("user.homenode.nodes"), starlark.String(value))
		}
		fields := starlark.StringDict{"server_name": starlark.String(name), "config": config}
		candidates = append(candidates, starlarkstruct.FromStringDict(starlark.String("ClusterMember"), fields))
	}
	request := starlarkstruct.FromStringDict(starlark.String("InstancePlacement"), starlark.StringDict{"reason": starlark.String("new")})
	returned, err := starlark.Call(thread, globals["instance_placement"], nil, []starlark.Tuple{
		{starlark.String("request"), request},
		{starlark.String("candidate_members"), starlark.NewList(candidates)},
	})
	if err != nil || returned != starlark.None {
		t.Fatal(returned, err)
	}
	return came
}

const gib = 1 << 30

func TestPlacementChoosesTheMemberWithMostLeft(t *testing.T) {
	all := []string{"a", "b", "c"}
	for _, one := range []struct {
		what    string
		cpus    int64
		memory  int64
		members map[string]string
		target  string
	}{
		{"the scarcest decides: half of b's CPUs stay, a quarter of a's memory", 4, 6 * gib,
			map[string]string{"a": "64.0/8589934592", "b": "8.0/68719476736", "c": "1.0/1"}, "b"},
		{"a node of its own beats the same on two", 4, 6 * gib,
			map[string]string{"a": "4.0/4294967296 4.0/4294967296", "b": "8.0/8589934592", "c": ""}, "b"},
		{"where it fits on none of them, what all have together counts", 4, 6 * gib,
			map[string]string{"a": "1.0/1", "b": "4.0/4294967296 4.0/4294967296", "c": "1.0/1"}, "b"},
		{"a member that says nothing is average: worse than the best, better than the worst", 2, gib,
			map[string]string{"a": "2.5/2147483648", "c": "8.0/8589934592"}, "c"},
		{"what is written otherwise is nothing", 2, gib,
			map[string]string{"a": "much", "b": "4.0/4294967296", "c": "-8.0/8589934592 9/9"}, "b"},
		{"nobody says anything: Incus chooses", 2, gib, map[string]string{}, ""},
		{"nothing is asked for: Incus chooses", 0, 0, map[string]string{"a": "8.0/8589934592"}, ""},
	} {
		if came := place(t, one.cpus, one.memory, all, one.members); came.target != one.target {
			t.Errorf("%s: %q, %v", one.what, came.target, came.logged)
		}
	}
}

func TestPlacementOfWhatAgentsSay(t *testing.T) {
	text := os.Getenv("MEMBERS")
	if text == "" {
		t.Skip("MEMBERS is not set")
	}
	var members map[string]string
	if err := json.Unmarshal([]byte(text), &members); err != nil {
		t.Fatal(err)
	}
	came := place(t, 4, 4*gib, []string{"full", "silent", "empty"}, members)
	if came.target != "empty" {
		t.Errorf("%q, %v of %v", came.target, came.logged, members)
	}
}
