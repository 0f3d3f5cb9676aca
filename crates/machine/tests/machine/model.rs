//! Queries on the machines that come with the program.

use homenode_machine_files::preset;
use homenode_units::{NodeId, NodeSet};

#[test]
fn the_json_is_what_programs_want() {
    let machine = preset("amd48").unwrap();
    let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&machine).unwrap()).unwrap();
    assert_eq!(json["name"], "amd48");
    assert_eq!(json["nodes"].as_array().unwrap().len(), 8);
    assert_eq!(json["cpus"].as_array().unwrap().len(), 48);
    assert_eq!(
        json["nodes"][3],
        serde_json::json!({
            "id": 3, "cpus": [18, 19, 20, 21, 22, 23], "memory_bytes": 16_u64 << 30, "memory_allowed": true,
            "memory_bandwidth_bytes_per_s": 13_u64 << 30, "socket": 1, "llcs": [3],
        })
    );
    assert_eq!(
        json["cpus"][20],
        serde_json::json!({"id": 20, "node": 3, "socket": 1, "core": 20, "llc": 3})
    );
    assert_eq!(
        json["distances"][0],
        serde_json::json!([10, 16, 16, 22, 16, 22, 16, 22])
    );
    assert_eq!(
        json["links"][0],
        serde_json::json!({"from": 0, "to": 1, "bandwidth_bytes_per_s": 6_u64 << 30})
    );
    assert_eq!(json["llcs"][7]["size_bytes"], 5 << 20);
    assert_eq!(json["devices"][1]["node"], 6);
    assert_eq!(json["hardware"]["clock_hz"], 2_200_000_000_u64);
    assert!(json["notes"].is_array());
}

#[test]
fn memory_that_a_cpuset_forbids_is_no_home() {
    let mut machine = preset("r910").unwrap();
    machine.memory_allowed.remove(NodeId(2));
    assert_eq!(
        machine.memory_nodes(),
        [0, 1, 3].map(NodeId).into_iter().collect::<NodeSet>()
    );
}

#[test]
fn the_json_of_a_machine_reads_back_as_it() {
    for name in homenode_machine_files::preset_names() {
        let machine = preset(name).unwrap();
        let text = serde_json::to_string(&machine).unwrap();
        let read: homenode_machine::Machine = serde_json::from_str(&text).unwrap();
        assert_eq!(read, machine);
        let broken = text.replacen("\"memory_bytes\":", "\"memory_bytes\":-", 1);
        assert!(serde_json::from_str::<homenode_machine::Machine>(&broken).is_err());
        let mut broken: serde_json::Value = serde_json::from_str(&text).unwrap();
        broken["distances"] = serde_json::json!([[20]]);
        assert!(
            serde_json::from_value::<homenode_machine::Machine>(broken).is_err(),
            "{name}"
        );
    }
}
