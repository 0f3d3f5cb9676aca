// Package shims runs Kubernetes' own client of scheduler extenders against ours, and our scriptlet in Incus' interpreter.
//
// ../test_kubernetes.py and ../test_incus.py start the servers and run these tests, which are skipped without them.
package shims

import (
	"os"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler"
	schedulerapi "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

func client(t *testing.T, isCapable bool) framework.Extender {
	address := os.Getenv("EXTENDER")
	if address == "" {
		t.Skip("EXTENDER is not set")
	}
	extender, err := scheduler.NewHTTPExtender(&schedulerapi.Extender{
		URLPrefix:        address,
		PrioritizeVerb:   "prioritize",
		Weight:           3,
		NodeCacheCapable: isCapable,
		HTTPTimeout:      metav1.Duration{Duration: 2 * time.Second},
	})
	if err != nil {
		t.Fatal(err)
	}
	return extender
}

func pod(cpu, memory string) *v1.Pod {
	container := v1.Container{Name: "c"}
	if cpu != "" {
		container.Resources.Requests = v1.ResourceList{
			v1.ResourceCPU:    resource.MustParse(cpu),
			v1.ResourceMemory: resource.MustParse(memory),
		}
	}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default"},
		Spec:       v1.PodSpec{Containers: []v1.Container{container}},
	}
}

func nodes(names ...string) []fwk.NodeInfo {
	var all []fwk.NodeInfo
	for _, name := range names {
		info := framework.NewNodeInfo()
		info.SetNode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		all = append(all, info)
	}
	return all
}

func priorities(t *testing.T, extender framework.Extender, asked *v1.Pod) map[string]int64 {
	list, weight, err := extender.Prioritize(asked, nodes("full", "empty", "silent"))
	if err != nil {
		t.Fatal(err)
	}
	if weight != 3 || len(*list) != 3 {
		t.Fatalf("weight %d, %v", weight, *list)
	}
	found := map[string]int64{}
	for _, one := range *list {
		found[one.Host] = one.Score
	}
	return found
}

func TestExtenderPrefersTheNodeWithRoomAndTakesASilentOneForAverage(t *testing.T) {
	begun := time.Now()
	found := priorities(t, client(t, true), pod("4", "4Gi"))
	if !(found["empty"] > found["silent"] && found["silent"] > found["full"]) || found["empty"] > 10 {
		t.Errorf("%v", found)
	}
	if took := time.Since(begun); took > time.Second {
		t.Errorf("a silent node took %s", took)
	}
}

func TestExtenderHasNoPreferenceForAPodThatAsksForNothing(t *testing.T) {
	found := priorities(t, client(t, true), pod("", ""))
	if found["empty"] != found["full"] || found["full"] != found["silent"] {
		t.Errorf("%v", found)
	}
}

func TestExtenderSaysThatItWantsNames(t *testing.T) {
	if list, _, err := client(t, false).Prioritize(pod("4", "4Gi"), nodes("full")); err == nil {
		t.Errorf("%v", list)
	}
}
