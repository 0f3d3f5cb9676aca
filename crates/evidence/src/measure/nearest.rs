//! The preset that is most like a machine.

use homenode_machine::Machine;
use homenode_machine_files::{preset, preset_names};

/// How much each feature counts. The memory hierarchy says more about a processor than the number of its CPUs.
const WEIGHTS: [f64; 5] = [2.0, 2.0, 1.0, 1.0, 0.5];

/// LLC bytes, L2 bytes, clock, nodes, CPUs per node.
fn features(machine: &Machine) -> Option<[f64; 5]> {
    let hardware = machine.hardware.as_ref()?;
    let nodes = machine.nodes.len().max(1) as f64;
    Some([
        machine.llcs.first()?.size_bytes.as_f64(),
        hardware.l2_bytes.as_f64(),
        hardware.clock_hz as f64,
        nodes,
        machine.cpus.len() as f64 / nodes,
    ])
}

/// Returns the preset with the least weighted sum of the features' ratios (as logarithms) to a measured machine; `None` if it has
/// no figures.
pub(super) fn nearest(machine: &Machine) -> Option<Machine> {
    let own = features(machine)?;
    let presets = preset_names().filter_map(|name| preset(name).ok());
    let distance = |other: &Machine| {
        let ratios = own.iter().zip(features(other)?).zip(WEIGHTS);
        let sum: f64 = ratios.map(|((a, b), weight)| weight * (a / b).ln().abs()).sum();
        sum.is_finite().then_some(sum)
    };
    let known = presets.filter_map(|other| Some((distance(&other)?, other)));
    known
        .min_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, machine)| machine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_is_nearest_to_itself() {
        for name in preset_names() {
            let machine = preset(name).unwrap();
            if features(&machine).is_some() {
                let found = nearest(&machine).unwrap();
                assert_eq!(features(&found), features(&machine), "{name}: {}", found.name);
            }
        }
    }
}
