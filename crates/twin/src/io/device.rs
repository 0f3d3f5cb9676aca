//! One device: its queue, and its transfers by the node of the memory involved.

use homenode_units::{BytesPerSec, Ns};

use crate::hardware::fabric::Copying;

/// Change of a device's rate that controllers and links get to see, as a share of its bandwidth.
const RATE_CHANGE_MIN: f64 = 0.05;

/// A device that serves requests first come, first served.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    /// Position of the device's node.
    pub node: usize,
    /// Bandwidth in bytes per nanosecond.
    bandwidth: f64,
    /// Time at which the device has transferred all that was requested, in nanoseconds.
    free_ns: f64,
    /// Bytes that the device has yet to transfer, by the node of their memory.
    left: Vec<f64>,
    /// Rate in bytes per nanosecond for each node, as controllers and links see it.
    rates: Vec<f64>,
}

impl Device {
    pub(crate) fn new(node: usize, bandwidth: BytesPerSec, nodes: usize) -> Device {
        Device {
            node,
            bandwidth: bandwidth.as_f64() / 1e9,
            free_ns: 0.0,
            left: vec![0.0; nodes],
            rates: vec![0.0; nodes],
        }
    }

    /// Takes a request for memory whose pages are spread over nodes as in `pages`. Returns the time at which the request is done.
    pub(crate) fn serve(&mut self, bytes: f64, latency_ns: f64, now: Ns, pages: &[u64]) -> Ns {
        self.free_ns = self.free_ns.max(now.as_f64()) + bytes / self.bandwidth;
        let all = pages.iter().sum::<u64>().max(1) as f64;
        for (left, pages) in self.left.iter_mut().zip(pages) {
            *left += bytes * (*pages as f64 / all);
        }
        let done = (self.free_ns + latency_ns).ceil() as u64;
        Ns(done.max(now.0 + 1))
    }

    /// Counts the bytes that the device has transferred by `now`, the end of a stretch of `ns`, by node. Returns true if its
    /// rates have changed so much that others feel it.
    pub(crate) fn transfer(&mut self, now: Ns, ns: f64, mut transferred: impl FnMut(usize, f64)) -> bool {
        let all: f64 = self.left.iter().sum();
        let still = (self.bandwidth * (self.free_ns - now.as_f64())).clamp(0.0, all);
        let share = if all > 0.0 { 1.0 - still / all } else { 0.0 };
        let idle = share == 0.0;
        let change: f64 = self
            .left
            .iter()
            .zip(&self.rates)
            .map(|(left, rate)| (left * share / ns - rate).abs())
            .sum();
        let changed = change > RATE_CHANGE_MIN * self.bandwidth || (idle && change > 0.0);
        for (node, (left, rate)) in self.left.iter_mut().zip(&mut self.rates).enumerate() {
            let bytes = *left * share;
            if bytes > 0.0 {
                transferred(node, bytes);
            }
            *left -= bytes;
            if changed {
                *rate = bytes / ns;
            }
        }
        changed
    }

    /// Returns the device's traffic, as controllers and links see it.
    pub(crate) fn copying(&self) -> impl Iterator<Item = Copying> + '_ {
        let rates = self.rates.iter().copied().enumerate();
        rates.filter(|(_, rate)| *rate > 0.0).map(|(to, rate)| Copying {
            from: self.node,
            to,
            rate,
            by_device: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a device of 1 byte per nanosecond on node 1 of 2.
    fn device() -> Device {
        Device::new(1, BytesPerSec(1_000_000_000), 2)
    }

    #[test]
    fn requests_wait_for_those_before_them_and_overlap_in_latency() {
        let mut device = device();
        assert_eq!(device.serve(100.0, 50.0, Ns(0), &[1, 0]), Ns(150));
        assert_eq!(device.serve(100.0, 50.0, Ns(10), &[1, 0]), Ns(250));
        assert_eq!(device.serve(100.0, 50.0, Ns(1000), &[1, 0]), Ns(1150));
    }

    #[test]
    fn transfers_go_to_the_nodes_of_the_pages_as_fast_as_the_device_is_busy() {
        let mut device = device();
        device.serve(400.0, 50.0, Ns(0), &[1, 3]);
        let mut bytes = [0.0; 2];
        assert!(device.transfer(Ns(100), 100.0, |node, count| bytes[node] += count));
        assert_eq!(bytes, [25.0, 75.0]);
        let rates: Vec<f64> = device.copying().map(|copy| copy.rate).collect();
        assert_eq!(rates, [0.25, 0.75]);
        assert!(!device.transfer(Ns(200), 100.0, |node, count| bytes[node] += count));
        device.transfer(Ns(1000), 800.0, |node, count| bytes[node] += count);
        assert_eq!(bytes, [100.0, 300.0]);
        assert!(device.transfer(Ns(2000), 1000.0, |_, _| panic!("nothing is left")));
        assert_eq!(device.copying().count(), 0);
    }
}
