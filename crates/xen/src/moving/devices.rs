//! Disks and NICs of a domain that is moved. For a moment there are two of it, and dom0 serves both.
//!
//! Xen's own scripts know that a domain may be migrated to where it is: a block device is handed to a second domain where that
//! has the UUID of the first, and a bridge takes both interfaces. The new domain runs only once the old one has stopped for good. What
//! is served in another way, or by others than dom0's kernel, has to be told so by whoever knows it, and is not moved.

use serde_json::{Map, Value};

use crate::store::Asking;

/// A kind of device that can be served twice.
struct Kind {
    /// As a configuration has it: a list of such devices.
    configured: &'static str,
    /// As xenstore has it, both of the domain and of who serves it.
    attached: &'static str,
    /// What may be said of one, whatever it says.
    any: &'static [&'static str],
    /// What may be said of one, if it says this.
    must: &'static [(&'static str, &'static [&'static str])],
    /// What xenstore says of how it is served, by its name there: nothing, or one of these.
    served: &'static [(&'static str, &'static [&'static str])],
    /// Which are meant, as the end of a sentence.
    which: &'static str,
}

const KINDS: [Kind; 2] = [
    Kind {
        configured: "disks",
        attached: "vbd",
        any: &[
            "pdev_path",
            "vdev",
            "removable",
            "readwrite",
            "direct_io_safe",
            "discard_enable",
            "trusted",
        ],
        must: &[
            ("backend", &["phy"]),
            ("format", &["raw"]),
            ("specification", &["xen"]),
            ("is_cdrom", &["0"]),
            ("colo_enable", &["False"]),
            ("colo_restore_enable", &["False"]),
            ("backend_domid", &["0"]),
        ],
        served: &[("type", &["phy"]), ("script", &["/etc/xen/scripts/block"])],
        which: "only a disk that is a block device of dom0 is moved with its domain",
    },
    Kind {
        configured: "nics",
        attached: "vif",
        any: &[
            "devid",
            "mtu",
            "model",
            "mac",
            "bridge",
            "rate_bytes_per_interval",
            "rate_interval_usecs",
            "trusted",
        ],
        must: &[
            ("nictype", &["vif"]),
            ("script", &["vif-bridge", BRIDGE]),
            ("backend_domid", &["0"]),
        ],
        served: &[("type", &["vif"]), ("script", &[BRIDGE]), ("vifname", &[])],
        which: "only a NIC on a bridge of dom0's that has no name of its own there (`vifname`) is moved with its domain",
    },
];
const BRIDGE: &str = "/etc/xen/scripts/vif-bridge";

/// What a configuration calls lists of devices that may be moved.
pub fn is_known(name: &str) -> bool {
    KINDS.iter().any(|kind| kind.configured == name)
}

/// Whether what a configuration says of devices is of those that can be served twice.
///
/// # Errors
/// Which is not, as the end of a sentence.
pub fn configured(of: &Map<String, Value>) -> Result<(), String> {
    for kind in &KINDS {
        let Some(devices) = of.get(kind.configured) else {
            continue;
        };
        let unclear = || format!("its configuration has `{}` that are no list", kind.configured);
        for device in devices.as_array().ok_or_else(unclear)? {
            let said = device.as_object().ok_or_else(unclear)?;
            let other = said.iter().find(|(key, value)| !kind.may_say(key, value));
            if let Some((key, value)) = other {
                return Err(format!(
                    "its configuration says `{key}` = {value} of one of its `{}`: {}",
                    kind.configured, kind.which
                ));
            }
        }
    }
    Ok(())
}

impl Kind {
    fn may_say(&self, key: &str, value: &Value) -> bool {
        let is_one = |values: &&[&str]| match value {
            Value::String(text) => values.contains(&text.as_str()),
            Value::Number(number) => values.contains(&number.to_string().as_str()),
            _ => false,
        };
        let must = self.must.iter().find(|(name, _)| *name == key);
        self.any.contains(&key) || must.is_some_and(|(_, values)| is_one(values))
    }
}

/// Whether all devices that a domain has, and its console, can be served twice, as xenstore says that they are served. A guest
/// writes none of it.
///
/// # Errors
/// Which cannot, as the end of a sentence.
pub fn attached(store: &mut Asking, domid: u32) -> Result<(), String> {
    let mut read = |paths: Vec<String>| {
        let told = store.read(paths);
        told.map_err(|why| format!("xenstored does not tell what devices it has: {why}"))
    };
    let of_all = format!("/libxl/{domid}/device");
    let lines = |told: &[Option<String>]| -> Vec<String> {
        let told = told.first().cloned().flatten().unwrap_or_default();
        told.lines().map(str::to_owned).collect()
    };
    for name in lines(&read(vec![format!("{of_all}/")])?) {
        if name == "console" {
            continue;
        }
        let Some(kind) = KINDS.iter().find(|kind| kind.attached == name) else {
            return Err(format!(
                "it has a device `{name}`: what serves that would have to serve two of it at once, which was not tried"
            ));
        };
        for number in lines(&read(vec![format!("{of_all}/{name}/")])?) {
            let served = format!("/local/domain/0/backend/{name}/{domid}/{number}");
            let mut paths = vec![format!("{of_all}/{name}/{number}/backend")];
            paths.extend(kind.served.iter().map(|(key, _)| format!("{served}/{key}")));
            let told = read(paths)?;
            let said = told.get(1..).unwrap_or_default().iter().zip(kind.served);
            let other = said
                .filter_map(|(said, (key, values))| Some((said.as_deref()?, key, values)))
                .find(|(said, _, values)| !values.contains(said));
            if let Some((said, key, _)) = other {
                return Err(format!(
                    "its device `{name}` {number} is served with `{key}` = `{said}`: {}",
                    kind.which
                ));
            }
            if told.first().and_then(Option::as_deref) != Some(served.as_str()) {
                return Err(format!(
                    "its device `{name}` {number} is served by another than dom0's kernel: {}",
                    kind.which
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::store::Source;

    /// What xenstore has of a domain with a disk and a NIC.
    const STORE: [(&str, &str); 9] = [
        ("/libxl/3/device/", "console\nvbd\nvif"),
        ("/libxl/3/device/vbd/", "51712"),
        (
            "/libxl/3/device/vbd/51712/backend",
            "/local/domain/0/backend/vbd/3/51712",
        ),
        ("/local/domain/0/backend/vbd/3/51712/type", "phy"),
        (
            "/local/domain/0/backend/vbd/3/51712/script",
            "/etc/xen/scripts/block",
        ),
        ("/libxl/3/device/vif/", "0"),
        ("/libxl/3/device/vif/0/backend", "/local/domain/0/backend/vif/3/0"),
        ("/local/domain/0/backend/vif/3/0/type", "vif"),
        (
            "/local/domain/0/backend/vif/3/0/script",
            "/etc/xen/scripts/vif-bridge",
        ),
    ];

    fn attached_with(path: &str, value: &str) -> Result<(), String> {
        let mut all = BTreeMap::from(STORE);
        all.insert(path, value);
        let all: BTreeMap<String, String> = all
            .into_iter()
            .map(|(path, value)| (path.to_owned(), value.to_owned()))
            .collect();
        let source = Source::new(move |paths| Ok(paths.iter().map(|path| all.get(path).cloned()).collect()));
        attached(&mut Asking::start(source), 3)
    }

    #[test]
    fn a_block_device_and_a_nic_on_a_bridge_are_served_twice_and_nothing_else_is() {
        assert_eq!(attached_with("/libxl/4/device/", "vfb"), Ok(()));
        let served = "/local/domain/0/backend";
        for (path, value, word) in [
            ("/libxl/3/device/".to_owned(), "console\nvfb", "`vfb`"),
            (
                "/libxl/3/device/vbd/51712/backend".to_owned(),
                "/local/domain/0/backend/qdisk/3/51712",
                "another than dom0's kernel",
            ),
            (
                "/libxl/3/device/vif/0/backend".to_owned(),
                "/local/domain/2/backend/vif/3/0",
                "another than dom0's kernel",
            ),
            (format!("{served}/vbd/3/51712/type"), "qdisk", "`type`"),
            (
                format!("{served}/vbd/3/51712/script"),
                "/etc/xen/scripts/block-iscsi",
                "block-iscsi",
            ),
            (
                format!("{served}/vif/3/0/script"),
                "/etc/xen/scripts/vif-route",
                "vif-route",
            ),
            (format!("{served}/vif/3/0/vifname"), "web0", "`vifname`"),
        ] {
            let said = attached_with(&path, value).unwrap_err();
            assert!(said.contains(word), "{said}");
        }
        // One that says no more where it is served.
        let said = attached_with("/libxl/3/device/vbd/", "51712\n51728").unwrap_err();
        assert!(said.contains("51728"), "{said}");
    }

    #[test]
    fn what_is_not_known_of_a_device_in_a_configuration_keeps_its_domain_where_it_is() {
        let of = |text: &str| configured(serde_json::from_str::<Value>(text).unwrap().as_object().unwrap());
        let disk = r#"{"disks":[{"pdev_path":"/dev/vdb","vdev":"xvda","backend":"phy","format":"raw","readwrite":1,"colo_restore_enable":"False"}]}"#;
        let nic = r#"{"nics":[{"devid":0,"mac":"00:16:3e:00:00:01","bridge":"xenbr0","script":"/etc/xen/scripts/vif-bridge","nictype":"vif"}]}"#;
        assert_eq!((of(disk), of(nic), of("{}")), (Ok(()), Ok(()), Ok(())));
        for (text, from, to, word) in [
            (disk, "\"phy\"", "\"qdisk\"", "qdisk"),
            (disk, "\"raw\"", "\"qcow2\"", "qcow2"),
            (disk, "\"readwrite\"", "\"script\"", "`script`"),
            (disk, "\"readwrite\"", "\"is_cdrom\"", "is_cdrom"),
            (disk, "\"readwrite\"", "\"backend_domid\"", "backend_domid"),
            (nic, "vif-bridge", "vif-openvswitch", "openvswitch"),
            (nic, "\"devid\":0", "\"ifname\":\"web0\"", "`ifname`"),
            (nic, "[{", "{\"a\":[{", "no list"),
        ] {
            let text = text.replacen(from, to, 1);
            let text = text.replace("}]}", if to.starts_with("{\"a") { "}]}}" } else { "}]}" });
            let said = of(&text).unwrap_err();
            assert!(said.contains(word), "{said}");
        }
    }
}
