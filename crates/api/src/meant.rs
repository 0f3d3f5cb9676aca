//! Resolves a user's text, a name or a UUID, to a VM.

use homenode_control::VmStatus;
use homenode_units::VmId;

use crate::answer::ApiError;

/// Returns the VM that a text means. A UUID means the VM that has it, even if another VM has that text as its name. A name that
/// several VMs have is ambiguous.
///
/// # Errors
/// If the text means no VM, or several VMs.
pub fn meant<'a, T>(
    all: &'a [T],
    of: impl Fn(&'a T) -> (VmId, &'a str),
    text: &str,
) -> Result<&'a T, ApiError> {
    if let Some(id) = VmId::parse(text)
        && let Some(found) = all.iter().find(|one| of(one).0 == id)
    {
        return Ok(found);
    }
    let named: Vec<&T> = all.iter().filter(|one| of(one).1 == text).collect();
    match named[..] {
        [found] => Ok(found),
        [] => Err(ApiError::NoSuchVm {
            vm: text.to_owned(),
            running: all.iter().map(|one| of(one).1.to_owned()).collect(),
        }),
        _ => Err(ApiError::AmbiguousVm {
            vm: text.to_owned(),
            ids: named.into_iter().map(|one| of(one).0).collect(),
        }),
    }
}

/// Like [`meant`], for the agent's list of VMs.
///
/// # Errors
/// If the text means no VM, or several VMs.
pub fn named<'a>(vms: &'a [VmStatus], text: &str) -> Result<&'a VmStatus, ApiError> {
    meant(vms, |vm| (vm.id, vm.name.as_str()), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(all: &[(VmId, &str)], text: &str) -> Result<VmId, ApiError> {
        meant(all, |(id, name)| (*id, name), text).map(|(id, _)| *id)
    }

    #[test]
    fn a_name_that_two_vms_have_is_refused_with_both_uuids_and_each_is_meant_by_its_own() {
        let (one, two, third) = (VmId(0x11), VmId(0x22), VmId(0x33));
        let all = [(one, "web"), (third, "db"), (two, "web")];
        let refused = found(&all, "web").unwrap_err();
        let text = refused.to_string();
        assert!(refused.is_about_input());
        assert!(
            text.contains(&one.to_string()) && text.contains(&two.to_string()),
            "{text}"
        );
        assert!(
            text.contains("UUID") && !text.contains(&third.to_string()),
            "{text}"
        );
        for id in [one, two, third] {
            let spellings = [
                id.to_string(),
                id.to_string().to_uppercase(),
                id.to_string().replace('-', ""),
            ];
            assert!(spellings.iter().all(|text| found(&all, text) == Ok(id)));
        }
        assert_eq!(found(&all, "db"), Ok(third));
        let none = found(&all, "wep").unwrap_err().to_string();
        assert!(none.contains("wep") && none.contains("db"), "{none}");
    }

    #[test]
    fn a_vm_that_is_named_as_the_uuid_of_another_is_not_taken_for_it() {
        let (one, two) = (VmId(0x11), VmId(0x22));
        let name = two.to_string();
        let all = [(one, name.as_str()), (two, "web")];
        assert_eq!(found(&all, &name), Ok(two));
        assert_eq!(found(&all[..1], &name), Ok(one));
    }
}
