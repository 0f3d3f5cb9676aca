//! The load of the most loaded link, second by second [Policies, section 3.5.2].

use homenode_units::Ns;

/// Shortest period over which a link is measured.
const PERIOD: Ns = Ns::from_secs(1);

/// The most loaded link's load, summed over periods.
#[derive(Clone, Debug)]
pub(crate) struct Busiest {
    /// Sum of load times seconds, and sum of the seconds.
    pub sum: f64,
    pub seconds: f64,
    since: Ns,
    links: Vec<f64>,
}

impl Busiest {
    pub(crate) fn new(links: usize) -> Busiest {
        Busiest {
            sum: 0.0,
            seconds: 0.0,
            since: Ns::ZERO,
            links: vec![0.0; links],
        }
    }

    /// Whether the period is over. It ends with the first epoch that makes it long enough.
    pub(crate) fn due(&self, now: Ns) -> bool {
        now.0 - self.since.0 >= PERIOD.0
    }

    /// Adds the load of the period that [`Busiest::due`] has found to be over. `links` is what each link has carried since the
    /// start, in bytes; `caps` is each link's bandwidth in bytes per nanosecond, infinite if unknown.
    pub(crate) fn look(&mut self, now: Ns, links: Vec<f64>, caps: &[f64]) {
        let ns = (now.0 - self.since.0) as f64;
        let loads = links.iter().zip(&self.links).zip(caps);
        let most = loads
            .map(|((now, then), cap)| (now - then) / (cap * ns))
            .fold(0.0, f64::max);
        self.sum += most * ns / 1e9;
        self.seconds += ns / 1e9;
        self.since = now;
        self.links = links;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_loaded_link_of_each_second_counts() {
        // Link 0 is fully loaded in the first second, link 1 half loaded in the next two: (1 + 0.5 * 2) / 3 seconds.
        let mut busiest = Busiest::new(2);
        let caps = [1.0, 2.0];
        assert!(!busiest.due(Ns(500_000_000)) && busiest.due(Ns(1_000_000_000)));
        busiest.look(Ns(1_000_000_000), vec![1e9, 0.0], &caps);
        busiest.look(Ns(3_000_000_000), vec![1e9, 2e9], &caps);
        assert!((busiest.sum / busiest.seconds - 2.0 / 3.0).abs() < 1e-12);
    }
}
