//! Fuzzes libvirt's XML of a domain, and the operator's settings in its metadata.

#![no_main]

use homenode_host::Setting;
use homenode_kvm::domain::{Domain, NAMESPACE, element};
use homenode_units::Bytes;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(domain) = Domain::parse(text) else { return };
    assert!(!domain.name.is_empty() && !domain.name.contains(['/', '\0']));
    assert!((1..=4096).contains(&domain.vcpus_current));
    let _ = domain.device_nodes(std::path::Path::new("/does-not-exist"));
    let _ = domain.settings(None, Vec::new());
    // The metadata that the agent writes can be parsed again, and keeps the operator's other settings.
    let Ok(said) = &domain.settings else { return };
    let Some(element) = element(&said.with(Setting::MemoryFloor(Some(Bytes::from_mib(64))))) else {
        panic!("an element with a floor is not empty");
    };
    let element = element.replacen("<vm", &format!("<h:vm xmlns:h='{NAMESPACE}'"), 1);
    let written = format!(
        "<domain><name>a</name><uuid>6695eb01-f6a4-8304-79aa-97f2502e193f</uuid><memory>1024</memory><vcpu>1</vcpu>\
         <metadata>{element}</metadata></domain>"
    );
    let again = Domain::parse(&written)
        .expect("well formed")
        .settings
        .expect("what was said reads");
    assert_eq!(again.memory_floor, Some(Bytes::from_mib(64)));
    assert_eq!(
        (
            &again.home,
            again.permit,
            again.bandwidth,
            again.memory_policy,
            again.management
        ),
        (
            &said.home,
            said.permit,
            said.bandwidth,
            said.memory_policy,
            said.management
        )
    );
});
