//! Disks and NICs of a domain that is moved. For a moment two copies of the domain exist, and dom0 serves both.
//!
//! Xen's own script for disks knows local migration: a second domain may use a block device that is in use if it has the UUID of
//! the first. A bridge takes the interfaces of both. The new domain runs only after the old one is destroyed and dom0 has written
//! everything that the old one had written. A domain is not moved if one of its devices is served in another way, or not by
//! dom0's kernel.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

use serde_json::{Map, Value};

use super::error::Unmovable;
use crate::store::Asking;

/// A kind of device that can be served to two domains at once.
struct Kind {
    /// The kind's name in a configuration, which has a list of such devices.
    configured: &'static str,
    /// The kind's name in xenstore, both for the domain and for the backend.
    attached: &'static str,
    /// Configuration keys that may have any value.
    any: &'static [&'static str],
    /// Configuration keys that must have one of these values.
    must: &'static [(&'static str, &'static [&'static str])],
    /// Xenstore keys of the backend. Each must be absent or have one of these values.
    served: &'static [(&'static str, &'static [&'static str])],
    /// Where dom0 would look for the new domain's device.
    place: Place,
    /// Xenstore key with a value that the new device must share with the current one.
    same: &'static str,
    /// Says which devices of this kind can be moved, as the end of a sentence.
    which: &'static str,
}

/// Where dom0 looks for a device.
enum Place {
    /// At the path that this xenstore key holds.
    Told(&'static str),
    /// At the bridge that the device's port is on.
    Port,
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
        place: Place::Told("params"),
        same: "physical-device",
        which: "only disks that are block devices of dom0 can move with their domain",
    },
    Kind {
        configured: "nics",
        attached: "vif",
        any: &[
            "devid",
            "mtu",
            "model",
            "mac",
            "ip",
            "gatewaydev",
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
        place: Place::Port,
        same: "bridge",
        which: "only NICs on a bridge of dom0, without a name set by `vifname`, can move with their domain",
    },
];
const BRIDGE: &str = "/etc/xen/scripts/vif-bridge";

/// Returns true if a configuration uses this name for devices that may be moved.
pub(crate) fn is_known(name: &str) -> bool {
    KINDS.iter().any(|kind| kind.configured == name)
}

/// Checks that all devices in a configuration can be served to two domains.
///
/// # Errors
/// Returns the device that cannot, as the end of a sentence.
pub(crate) fn configured(of: &Map<String, Value>) -> Result<(), Unmovable> {
    for kind in &KINDS {
        let Some(devices) = of.get(kind.configured) else {
            continue;
        };
        let unclear = || Unmovable::NoList(kind.configured);
        for device in devices.as_array().ok_or_else(unclear)? {
            let said = device.as_object().ok_or_else(unclear)?;
            let other = said.iter().find(|(key, value)| !kind.may_say(key, value));
            if let Some((key, value)) = other {
                return Err(Unmovable::Configured {
                    devices: kind.configured,
                    key: key.clone(),
                    value: value.to_string(),
                    which: kind.which,
                });
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

/// A device of a domain: its kind and number, as in xenstore.
pub(crate) type Device = (String, String);

/// Returns what dom0 finds at a path: the number of a block device, or the target of a link in `/sys`.
pub(crate) fn found(path: &str) -> Option<String> {
    if path.starts_with("/sys/") {
        let to = std::fs::read_link(path).ok()?;
        return Some(to.file_name()?.to_str()?.to_owned());
    }
    let of = std::fs::metadata(path).ok()?;
    let number = of.file_type().is_block_device().then(|| of.rdev())?;
    // The format is that of Xen's script.
    Some(format!(
        "{:x}:{:x}",
        rustix::fs::major(number),
        rustix::fs::minor(number)
    ))
}

/// Returns a domain's devices except its console, if all of them can be served to two domains. This is judged by xenstore keys
/// that a guest cannot write, and by what dom0 finds: a disk's path must still lead to the domain's disk, and a NIC must still be
/// on the bridge that the new NIC would be on.
///
/// # Errors
/// Returns the device that cannot, as the end of a sentence.
pub(crate) fn attached(
    store: &mut Asking,
    domid: u32,
    found: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<Device>, Unmovable> {
    let mut read = |paths: Vec<String>| {
        let told = store.read(paths);
        told.map_err(Unmovable::DevicesUnknown)
    };
    let of_all = format!("/libxl/{domid}/device");
    let mut names = |path: String| -> Result<Vec<String>, Unmovable> {
        let told = read(vec![format!("{path}/")])?.pop().flatten();
        let told = told.ok_or(Unmovable::NoPath(path))?;
        Ok(told.lines().map(str::to_owned).collect())
    };
    let mut all = Vec::new();
    for name in names(of_all.clone())? {
        if name != "console" {
            let numbers = names(format!("{of_all}/{name}"))?;
            all.extend(numbers.into_iter().map(|number| (name.clone(), number)));
        }
    }
    for (name, number) in &all {
        let Some(kind) = KINDS.iter().find(|kind| kind.attached == name) else {
            return Err(Unmovable::Device(name.clone()));
        };
        let served = format!("/local/domain/0/backend/{name}/{domid}/{number}");
        let is = kind.same;
        let mut paths = vec![
            format!("{of_all}/{name}/{number}/backend"),
            format!("{served}/{is}"),
        ];
        paths.extend(kind.served.iter().map(|(key, _)| format!("{served}/{key}")));
        if let Place::Told(key) = kind.place {
            paths.push(format!("{served}/{key}"));
        }
        let told = read(paths)?;
        let of = |at: usize| told.get(at).and_then(Option::as_deref);
        if of(0) != Some(served.as_str()) {
            return Err(Unmovable::ServedByAnother {
                name: name.clone(),
                number: number.clone(),
                which: kind.which,
            });
        }
        let said = told.iter().skip(2).zip(kind.served);
        let other = said
            .filter_map(|(said, (key, values))| Some((said.as_deref()?, key, values)))
            .find(|(said, _, values)| !values.contains(said));
        if let Some((said, key, _)) = other {
            return Err(Unmovable::ServedWith {
                name: name.clone(),
                number: number.clone(),
                key,
                value: said.to_owned(),
                which: kind.which,
            });
        }
        let path = match kind.place {
            Place::Told(_) => told.last().cloned().flatten(),
            Place::Port => Some(format!("/sys/class/net/vif{domid}.{number}/master")),
        };
        let now = path.as_deref().and_then(found);
        if now.is_none() || now.as_deref() != of(1) {
            return Err(Unmovable::Changed {
                name: name.clone(),
                number: number.clone(),
                key: is,
                value: of(1).unwrap_or_default().to_owned(),
                new: now.unwrap_or_default(),
            });
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::store::Source;

    /// Xenstore keys of a domain with a disk and a NIC.
    const STORE: [(&str, &str); 12] = [
        ("/libxl/3/device/", "console\nvbd\nvif"),
        ("/libxl/3/device/vbd/", "51712"),
        (
            "/libxl/3/device/vbd/51712/backend",
            "/local/domain/0/backend/vbd/3/51712",
        ),
        ("/local/domain/0/backend/vbd/3/51712/type", "phy"),
        ("/local/domain/0/backend/vbd/3/51712/params", "/dev/vg/web"),
        ("/local/domain/0/backend/vbd/3/51712/physical-device", "fd:1a"),
        (
            "/local/domain/0/backend/vbd/3/51712/script",
            "/etc/xen/scripts/block",
        ),
        ("/libxl/3/device/vif/", "0"),
        ("/libxl/3/device/vif/0/backend", "/local/domain/0/backend/vif/3/0"),
        ("/local/domain/0/backend/vif/3/0/type", "vif"),
        ("/local/domain/0/backend/vif/3/0/bridge", "xenbr0"),
        (
            "/local/domain/0/backend/vif/3/0/script",
            "/etc/xen/scripts/vif-bridge",
        ),
    ];

    fn attached_with(path: &str, value: Option<&str>) -> Result<Vec<Device>, Unmovable> {
        let own = |text: &str| text.to_owned();
        let mut all: BTreeMap<String, String> = STORE.map(|(path, text)| (own(path), own(text))).into();
        match value {
            Some(value) => drop(all.insert(own(path), own(value))),
            None => drop(all.remove(path)),
        }
        let source = Source::new(move |paths| Ok(paths.iter().map(|path| all.get(path).cloned()).collect()));
        attached(&mut Asking::start(source), 3, &|path| match path {
            "/dev/vg/web" => Some("fd:1a".into()),
            "/sys/class/net/vif3.0/master" => Some("xenbr0".into()),
            _ => None,
        })
    }

    #[test]
    fn a_block_device_and_a_nic_on_a_bridge_are_served_twice_and_nothing_else_is() {
        let all = [
            ("vbd".to_owned(), "51712".to_owned()),
            ("vif".to_owned(), "0".to_owned()),
        ];
        assert_eq!(attached_with("/libxl/4/device/", Some("vfb")), Ok(all.into()));
        assert_eq!(attached_with("/libxl/3/device/", Some("console")), Ok(Vec::new()));
        let (disk, nic) = (
            "/local/domain/0/backend/vbd/3/51712",
            "/local/domain/0/backend/vif/3/0",
        );
        for (path, value, word) in [
            ("/libxl/3/device/".to_owned(), None, "no /libxl/3/device"),
            (
                "/libxl/3/device/".to_owned(),
                Some("console\nvfb"),
                "no /libxl/3/device/vfb",
            ),
            (
                "/libxl/3/device/vbd/51712/backend".to_owned(),
                Some("/local/domain/0/backend/qdisk/3/51712"),
                "not served by dom0's kernel",
            ),
            (
                "/libxl/3/device/vif/0/backend".to_owned(),
                Some("/local/domain/2/backend/vif/3/0"),
                "not served by dom0's kernel",
            ),
            (format!("{disk}/type"), Some("qdisk"), "`type`"),
            (
                format!("{disk}/script"),
                Some("/etc/xen/scripts/block-iscsi"),
                "block-iscsi",
            ),
            (
                format!("{nic}/script"),
                Some("/etc/xen/scripts/vif-route"),
                "vif-route",
            ),
            (format!("{nic}/vifname"), Some("web0"), "`vifname`"),
            // A path that now leads to another volume, or to none; a NIC that was put on another bridge.
            (
                format!("{disk}/physical-device"),
                Some("fd:1b"),
                "would have `fd:1a`",
            ),
            (format!("{disk}/params"), Some("/dev/vg/gone"), "would have ``"),
            (format!("{disk}/params"), None, "would have ``"),
            (format!("{nic}/bridge"), Some("xenbr1"), "would have `xenbr0`"),
            // A device that has no key for its backend.
            ("/libxl/3/device/vbd/".to_owned(), Some("51712\n51728"), "51728"),
        ] {
            let said = attached_with(&path, value).unwrap_err().to_string();
            assert!(said.contains(word), "{said}");
        }
    }

    #[test]
    fn dom0_tells_a_block_device_by_its_number_and_a_bridge_by_its_name() {
        assert_eq!(
            (found("/dev/null"), found("/no/such"), found("/sys/no/such")),
            (None, None, None)
        );
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
        ] {
            let said = of(&text.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(said.contains(word), "{said}");
        }
        for text in [r#"{"nics":{"a":[]}}"#, r#"{"disks":["a"]}"#] {
            assert!(of(text).unwrap_err().to_string().contains("not a list"), "{text}");
        }
    }
}
