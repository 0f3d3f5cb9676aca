//! The speeds of VMs in the pictures that were shown so far, which a VM's page draws as a row of bars.

use std::collections::{BTreeMap, VecDeque};

use homenode_units::{Ns, VmId};

use crate::pictures::Picture;

/// Pictures that are kept; each is a bar.
const KEPT: usize = 48;
/// If the next picture is later than this or earlier, time jumped, and the row begins again.
const APART_MAX: Ns = Ns::from_secs(60);
/// Bars from zero to twice the usual speed; the fourth is the usual speed.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The speeds of all VMs in the last pictures, each divided by the VM's usual speed.
#[derive(Clone, Debug, Default)]
pub struct Trail {
    pictures: VecDeque<(i64, BTreeMap<VmId, f64>)>,
}

impl Trail {
    /// Adds a picture. If the picture has the time of the last one, nothing is added.
    pub fn add(&mut self, picture: &Picture) {
        if let Some((last_ns, _)) = self.pictures.back() {
            let since = picture.wall_ns.saturating_sub(*last_ns);
            if since == 0 {
                return;
            }
            if !(0..=APART_MAX.0.cast_signed()).contains(&since) {
                self.pictures.clear();
            }
        }
        if self.pictures.len() == KEPT {
            self.pictures.pop_front();
        }
        let vms = picture.overview.status.vms.iter();
        let speeds = vms.filter_map(|vm| Some((vm.id, vm.speed_ratio?)));
        self.pictures.push_back((picture.wall_ns, speeds.collect()));
    }

    /// Returns a VM's speeds as a row of bars, with a blank where the speed is not known. Empty if it was never known.
    pub fn bars(&self, vm: VmId) -> String {
        let speeds = self.pictures.iter().map(|(_, speeds)| speeds.get(&vm));
        let bars: String = speeds
            .map(|speed| speed.map_or(' ', |speed| bar(*speed)))
            .collect();
        match bars.trim_end() {
            "" => String::new(),
            _ => format!("{bars}| usual: {}", bar(1.0)),
        }
    }
}

/// Returns the bar of a speed: the nearest of equal steps up to twice the usual speed.
fn bar(speed: f64) -> char {
    let at = (speed * (BARS.len() / 2) as f64).round() as usize;
    BARS[at.saturating_sub(1).min(BARS.len() - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::tests::{NOON_NS, overview};

    fn picture(second: i64, speed_ratio: Option<f64>) -> Picture {
        let mut overview = overview(1);
        overview.status.vms[0].speed_ratio = speed_ratio;
        Picture {
            wall_ns: NOON_NS + second * 1_000_000_000,
            overview,
        }
    }

    #[test]
    fn a_bar_is_drawn_for_each_picture_and_time_that_jumps_begins_a_new_row() {
        let mut trail = Trail::default();
        let id = picture(0, None).overview.status.vms[0].id;
        trail.add(&picture(0, None));
        assert_eq!(trail.bars(id), "", "its speed is not known yet");
        for (second, ratio) in [(1, 0.0), (2, 0.25), (2, 0.5), (3, 1.0), (4, 2.0), (5, 9.0)] {
            trail.add(&picture(second, Some(ratio)));
        }
        assert_eq!(trail.bars(id), " ▁▁▄██| usual: ▄");
        assert_eq!(trail.bars(VmId(0)), "");
        (6..200).for_each(|second| trail.add(&picture(second, Some(1.0))));
        assert_eq!(trail.bars(id).chars().filter(|c| *c == '▄').count(), KEPT + 1);
        trail.add(&picture(100, Some(0.5)));
        assert_eq!(trail.bars(id), "▂| usual: ▄");
    }
}
