//! A domain's configuration, in the JSON that `xl` keeps and sends with the domain. It is read for reasons not to move the
//! domain. Two things are changed in it: where memory comes from (`nodemap`), and the name while two copies of the domain exist.
//!
//! The text is `xl`'s own, and contains names and command lines that other people chose. Only the keys named here are known: a
//! domain whose configuration has any other is not moved.

use homenode_units::VmId;
use serde_json::{Map, Value};

use super::devices;
use super::error::{ConfigurationError, Unmovable};

/// Most bytes to read, which is more than any configuration has.
pub(crate) const BYTES_MAX: usize = 1 << 20;
/// The top-level keys that are known, except those for devices.
const KNOWN: [&str; 5] = [
    "on_poweroff",
    "on_reboot",
    "on_watchdog",
    "on_crash",
    "on_soft_reset",
];

/// How a domain is virtualised, if it can be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Paravirtualised: the hypervisor handles its page tables.
    Pv,
    /// Hardware virtualisation without an emulated PC.
    Pvh,
}

/// A domain's configuration; see the module.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Configuration {
    /// `c_info`: the domain's identity.
    info: Map<String, Value>,
    /// `b_info`: how the domain is built.
    built: Map<String, Value>,
    rest: Map<String, Value>,
}

impl Configuration {
    /// Parses a configuration.
    ///
    /// # Errors
    /// Returns what is wrong with it, as the end of a sentence.
    pub(crate) fn read(text: &[u8]) -> Result<Configuration, ConfigurationError> {
        if text.len() > BYTES_MAX {
            return Err(ConfigurationError::TooLong { bytes: text.len() });
        }
        // The text that `xl` keeps ends in a zero byte, as in C.
        let text = text.strip_suffix(&[0]).unwrap_or(text);
        let mut rest: Map<String, Value> =
            serde_json::from_slice(text).map_err(|error| ConfigurationError::NoJson(error.to_string()))?;
        if !rest.values().all(is_exact) {
            return Err(ConfigurationError::Inexact);
        }
        let mut part = |name: &'static str| match rest.remove(name) {
            Some(Value::Object(part)) => Ok(part),
            _ => Err(ConfigurationError::Lacks(name)),
        };
        Ok(Configuration {
            info: part("c_info")?,
            built: part("b_info")?,
            rest,
        })
    }

    /// Returns the text in the form that `xl` reads.
    pub(crate) fn written(&self) -> Vec<u8> {
        let mut all = self.rest.clone();
        all.insert("c_info".into(), self.info.clone().into());
        all.insert("b_info".into(), self.built.clone().into());
        serde_json::to_vec(&all).unwrap_or_default()
    }

    /// Returns the domain's UUID.
    pub(crate) fn vm(&self) -> Option<VmId> {
        VmId::parse(self.info.get("uuid")?.as_str()?)
    }

    /// Returns the domain's name.
    pub(crate) fn name(&self) -> Option<&str> {
        self.info.get("name")?.as_str()
    }

    /// Changes the name.
    pub(crate) fn rename(&mut self, name: &str) {
        self.info.insert("name".into(), name.into());
    }

    /// Returns true if the operator set a soft affinity for the domain's vCPUs.
    pub(crate) fn prefers_cpus(&self) -> bool {
        self.built.contains_key("vcpu_soft_affinity")
    }

    /// Returns the nodes that the domain's memory comes from, if its operator set them.
    pub(crate) fn nodemap(&self) -> Option<&Value> {
        self.built.get("nodemap")
    }

    /// Makes the domain's memory come from these nodes. With `None`, `xl` or the domain's affinities decide.
    pub(crate) fn set_nodemap(&mut self, nodes: Option<Value>) {
        match nodes {
            Some(nodes) => drop(self.built.insert("nodemap".into(), nodes)),
            None => drop(self.built.remove("nodemap")),
        }
    }

    /// Returns the domain's kind, if the domain can be moved at all.
    ///
    /// # Errors
    /// Returns why it cannot, as the end of a sentence.
    pub(crate) fn movable(&self) -> Result<Kind, Unmovable> {
        let (info, built) = (&self.info, &self.built);
        let kind = match info.get("type").and_then(Value::as_str) {
            Some("pv") => Kind::Pv,
            Some("pvh") => Kind::Pvh,
            Some("hvm") => return Err(Unmovable::Hvm),
            _ => return Err(Unmovable::UnknownKind),
        };
        let is_true = |part: &Map<String, Value>, key: &str| {
            part.get(key)
                .is_some_and(|value| value.as_bool() == Some(true) || value.as_str() == Some("True"))
        };
        if is_true(built, "disable_migrate") {
            return Err(Unmovable::NoMigrate);
        }
        if is_true(info, "driver_domain") {
            return Err(Unmovable::DriverDomain);
        }
        if built.contains_key("vnuma_nodes") {
            return Err(Unmovable::VirtualNodes);
        }
        if let Some(key) = ["irqs", "ioports", "iomem"]
            .into_iter()
            .find(|key| built.contains_key(*key))
        {
            return Err(Unmovable::Hardware(key));
        }
        let is_first = |key: &str, first: &[Value]| info.get(key).is_none_or(|pool| first.contains(pool));
        if !is_first("poolid", &[0.into()]) || !is_first("pool_name", &["Pool-0".into()]) {
            return Err(Unmovable::ConfiguredPool);
        }
        let others = self.rest.keys().map(String::as_str);
        let others = others.filter(|key| !KNOWN.contains(key) && !devices::is_known(key));
        let others: Vec<&str> = others.collect();
        if !others.is_empty() {
            return Err(Unmovable::Parts(others.join("`, `")));
        }
        devices::configured(&self.rest).map(|()| kind)
    }
}

/// Returns true if the value can be written exactly as it was read.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_i64() || number.is_u64(),
        Value::Array(all) => all.iter().all(is_exact),
        Value::Object(all) => all.values().all(is_exact),
        _ => true,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A configuration that Xen 4.17.7 keeps for a PVH domain, without line breaks.
    pub(crate) const KEPT: &str = r#"{"c_info":{"type":"pvh","name":"pvh","domid":4294967295,
        "uuid":"560f06d7-3070-4efa-981f-ca7533542446","run_hotplug_scripts":"True"},
        "b_info":{"max_vcpus":1,"avail_vcpus":[0],"vcpu_hard_affinity":[[3]],"vcpu_soft_affinity":[[3]],
        "numa_placement":"False","tsc_mode":"native","max_memkb":131072,"target_memkb":131072,"video_memkb":0,
        "sched_params":{},"claim_mode":"True","kernel":"/vmlinux","cmdline":"console=hvc0","type.pvh":{},
        "arch_arm":{},"arch_x86":{"msr_relaxed":"False"}},"on_soft_reset":"soft_reset"}"#;

    fn kept() -> Configuration {
        Configuration::read(KEPT.as_bytes()).unwrap()
    }

    fn with(from: &str, to: &str) -> Result<Kind, String> {
        assert!(KEPT.contains(from));
        let read = Configuration::read(KEPT.replace(from, to).as_bytes());
        let read = read.map_err(|error| error.to_string())?;
        read.movable().map_err(|error| error.to_string())
    }

    #[test]
    fn what_xl_keeps_is_read_and_written() {
        let mut of = kept();
        assert_eq!((of.movable(), of.name()), (Ok(Kind::Pvh), Some("pvh")));
        assert_eq!(of.vm(), VmId::parse("560f06d7-3070-4efa-981f-ca7533542446"));
        assert!(of.prefers_cpus() && of.nodemap().is_none());
        of.set_nodemap(Some(serde_json::json!([2])));
        of.rename("pvh--incoming");
        let again = Configuration::read(&[of.written(), vec![0]].concat()).unwrap();
        assert_eq!(
            (again.name(), again.nodemap()),
            (Some("pvh--incoming"), of.nodemap())
        );
        of.set_nodemap(None);
        of.rename("pvh");
        assert_eq!(of, kept());
    }

    #[test]
    fn what_cannot_be_moved_is_told_why() {
        for (from, to, why) in [
            ("\"type\":\"pvh\"", "\"type\":\"hvm\"", "device model"),
            ("\"type\":\"pvh\"", "\"type\":7", "what kind"),
            (
                "\"on_soft_reset\"",
                "\"disks\":[{\"backend\":\"tap\"}],\"on_soft_reset\"",
                "tap",
            ),
            (
                "\"on_soft_reset\"",
                "\"pcidevs\":[{}],\"nics\":[],\"vfbs\":[],\"on_soft_reset\"",
                "`pcidevs`, `vfbs`",
            ),
            (
                "\"max_vcpus\":1",
                "\"disable_migrate\":\"True\",\"max_vcpus\":1",
                "nomigrate",
            ),
            (
                "\"domid\"",
                "\"driver_domain\":\"True\",\"domid\"",
                "driver domain",
            ),
            ("\"domid\"", "\"pool_name\":\"fast\",\"domid\"", "pool"),
            (
                "\"max_vcpus\":1",
                "\"vnuma_nodes\":[],\"max_vcpus\":1",
                "virtual nodes",
            ),
            ("\"max_vcpus\":1", "\"irqs\":[9],\"max_vcpus\":1", "`irqs`"),
        ] {
            let said = with(from, to).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
        assert_eq!(
            with("\"domid\"", "\"pool_name\":\"Pool-0\",\"domid\""),
            Ok(Kind::Pvh)
        );
        assert!(
            with("\"video_memkb\":0", "\"video_memkb\":0.5")
                .unwrap_err()
                .contains("number")
        );
        assert!(with("\"b_info\"", "\"b\"").unwrap_err().contains("b_info"));
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "([{}\\[\\],:\"0-9a-z._]|c_info|b_info|nodemap|type|pv){0,80}") {
            if let Ok(mut read) = Configuration::read(text.as_bytes()) {
                let _ = read.movable();
                read.set_nodemap(Some(serde_json::json!([1])));
                proptest::prop_assert_eq!(Configuration::read(&read.written()), Ok(read));
            }
        }
    }
}
