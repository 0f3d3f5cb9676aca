//! A fake of `/sys/fs/resctrl`, for hosts whose processor has no CAT. Its files are plain ones, which accept every write.
//! [`resctrl_says`] states the kernel's answer by the kernel's rules: Linux 6.18, `fs/resctrl/ctrlmondata.c` and the document
//! `filesystems/resctrl.rst`.

use std::collections::BTreeSet;

use homenode_units::VmId;

use super::Tree;
use crate::confine::DIR;

/// Creates the fake's files, with 11 ways in each of two caches, and threads 41 and 42 in the default group. Devices fill the
/// two highest ways too, as on Intel's servers.
pub fn fake_resctrl(tree: &Tree) {
    let files = [
        ("schemata", "    MB:0=100;1=100\n    L3:0=7ff;1=7ff\n"),
        ("tasks", "1\n40\n41\n42\n"),
        ("info/last_cmd_status", "ok\n"),
        ("info/L3/cbm_mask", "7ff\n"),
        ("info/L3/min_cbm_bits", "2\n"),
        ("info/L3/shareable_bits", "600\n"),
        ("info/L3/bit_usage", "0=XXSSSSSSSSS;1=XXSSSSSSSSS\n"),
        ("info/L3/sparse_masks", "0\n"),
        ("info/MB/min_bandwidth", "10\n"),
        ("info/MB/bandwidth_gran", "10\n"),
    ];
    for (file, text) in files {
        tree.write(&format!("{DIR}/{file}"), text);
    }
}

/// Removes the files of a VM's group. The kernel removes them together with the group's directory, which a fake cannot.
pub fn empty_group(tree: &Tree, vm: VmId) {
    for file in ["schemata", "tasks"] {
        std::fs::remove_file(tree.root().join(format!("{DIR}/homenode-{vm}/{file}")))
            .expect("the group's file");
    }
}

/// Makes the kernel refuse what is written to the `schemata` of a VM's group, with EINVAL and this message. The file leads to one
/// of procfs, which takes nothing but a number.
pub fn refuse_schemata(tree: &Tree, vm: VmId, message: &str) {
    tree.write(&format!("{DIR}/info/last_cmd_status"), &format!("{message}\n"));
    let group = tree.root().join(format!("{DIR}/homenode-{vm}"));
    std::fs::create_dir_all(&group).expect("a directory");
    std::os::unix::fs::symlink("/proc/self/oom_score_adj", group.join("schemata")).expect("a link");
}

/// Returns what the kernel would answer to `text`, written to the `schemata` of a group that is not exclusive.
///
/// # Errors
/// The write would fail with EINVAL. The error is the message in `info/last_cmd_status`, empty if the kernel leaves none.
pub fn resctrl_says(tree: &Tree, text: &str) -> Result<(), String> {
    let Some(lines) = text.strip_suffix('\n') else {
        return Err(String::new());
    };
    for line in lines.split('\n') {
        let (resource, domains) = line.split_once(':').ok_or("Missing ':'")?;
        let resource = resource.trim();
        if domains.is_empty() {
            return Err(format!("Missing '{resource}' value"));
        }
        let mine = |line: &&str| line.trim().starts_with(&format!("{resource}:"));
        let default = read(tree, "schemata");
        let known = default
            .lines()
            .find(mine)
            .ok_or_else(|| format!("Unknown or unsupported resource name '{resource}'"))?;
        let mut seen = BTreeSet::new();
        for domain in domains.split(';').filter(|domain| !domain.is_empty()) {
            let pair = domain.split_once('=');
            let (id, value) = pair
                .and_then(|(id, value)| Some((id.parse::<u32>().ok()?, value.trim())))
                .ok_or("Missing '=' or non-numeric domain")?;
            if !values(known).iter().any(|(there, _)| *there == id) {
                return Err(String::new());
            }
            if !seen.insert(id) {
                return Err(format!("Duplicate domain {id}"));
            }
            match resource.starts_with("MB") {
                true => bandwidth(tree, resource, value)?,
                false => mask(tree, resource, id, value)?,
            }
        }
    }
    Ok(())
}

fn read(tree: &Tree, file: &str) -> String {
    std::fs::read_to_string(tree.root().join(DIR).join(file)).unwrap_or_default()
}

fn number(tree: &Tree, file: &str, radix: u32) -> u64 {
    u64::from_str_radix(read(tree, file).trim(), radix).unwrap_or(0)
}

/// Returns the numbers and values of a line of `schemata` or `bit_usage`.
fn values(line: &str) -> Vec<(u32, &str)> {
    let domains = line.rsplit(':').next().unwrap_or_default().trim();
    let pairs = domains.split(';').filter_map(|domain| domain.split_once('='));
    pairs
        .filter_map(|(id, value)| Some((id.trim().parse().ok()?, value)))
        .collect()
}

fn mask(tree: &Tree, resource: &str, id: u32, value: &str) -> Result<(), String> {
    let info = |file: &str, radix| number(tree, &format!("info/{resource}/{file}"), radix);
    let (all, least) = (info("cbm_mask", 16), info("min_cbm_bits", 10));
    let mask = u64::from_str_radix(value.trim_start_matches("0x"), 16)
        .map_err(|_| format!("Non-hex character in the mask {value}"))?;
    if (least > 0 && mask == 0) || mask > all {
        return Err("Mask out of range".to_owned());
    }
    let run = u64::from((mask >> mask.trailing_zeros().min(63)).trailing_ones());
    if info("sparse_masks", 10) == 0 && run < u64::from(mask.count_ones()) {
        return Err(format!("The mask {mask:x} has non-consecutive 1-bits"));
    }
    if run < least {
        return Err(format!("Need at least {least} bits in the mask"));
    }
    let usage = read(tree, &format!("info/{resource}/bit_usage"));
    let held = |by: char| {
        let of_cache = values(&usage).into_iter().find(|(there, _)| *there == id);
        let letters = of_cache.map_or("", |(_, letters)| letters).chars();
        letters.fold(0, |held, letter| (held << 1) | u64::from(letter == by))
    };
    if mask & held('P') != 0 {
        return Err("CBM overlaps with pseudo-locked region".to_owned());
    }
    if mask & held('E') != 0 {
        return Err("Overlaps with exclusive group".to_owned());
    }
    Ok(())
}

fn bandwidth(tree: &Tree, resource: &str, value: &str) -> Result<(), String> {
    let percent: u64 = value.parse().map_err(|_| format!("Invalid MB value {value}"))?;
    let least = number(tree, &format!("info/{resource}/min_bandwidth"), 10);
    if !(least..=100).contains(&percent) {
        return Err(format!("MB value {percent} out of range [{least},100]"));
    }
    Ok(())
}
