//! An operator's settings of a VM.

use homenode_units::{Bytes, Permit, Placing, VmId};

use super::{Breach, Check, expect, passed, sample, sample_of};
use crate::{Failure, Host, Mode, Setting};

pub(super) static KEPT: Check = Check {
    name: "a permit is kept with the VM until it is taken back",
    run: |host, vm| settings_are_kept(host, vm).map(passed),
};

fn settings_are_kept(host: &mut dyn Host, vm: VmId) -> Result<(), Breach> {
    let kept = |host: &mut dyn Host| Ok::<_, Breach>(sample_of(host, vm)?.settings);
    let first = sample(host)?.version;
    let permit = Permit::pollution(250_000).expect("a permit within its bounds");
    let policy = Placing::FirstTouch.alone();
    for setting in [
        Setting::Permit(Some(permit)),
        Setting::MemoryPolicy(Some(policy)),
        Setting::MemoryFloor(Some(Bytes::from_gib(1))),
        Setting::MemoryFloor(None),
        Setting::Mode(Some(Mode::Observe)),
        Setting::Mode(Some(Mode::Recommend)),
        Setting::Mode(None),
        Setting::Permit(None),
        Setting::MemoryPolicy(None),
    ] {
        let mut wanted = kept(host)?;
        wanted.set(setting);
        host.set(vm, setting)?;
        let seen = kept(host)?;
        expect(seen == wanted, || format!("set {setting:?}, seen is {seen:?}"))?;
    }
    expect(sample(host)?.version > first, || {
        "settings left the version as it was".into()
    })?;
    match host.set(VmId(vm.0 ^ 1), Setting::Permit(Some(permit))) {
        Err(error) if error.why == Failure::VmGone => Ok(()),
        other => Err(format!("expected a permit for an unknown VM to be refused, saw {other:?}").into()),
    }
}
