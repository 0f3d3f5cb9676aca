//! A server of requests whose times are measured as clients see them.
//!
//! Requests arrive by themselves (*open loop*): the time between two is drawn from an exponential distribution, whatever the
//! server does. A request's time counts from its arrival, not from the moment at which the server begins with it, so waiting
//! behind others counts too. Without that a slow server would seem to have few late requests.

use std::time::{Duration, Instant};

/// When requests arrive.
#[derive(Clone, Copy, Debug)]
pub struct Arrivals {
    state: u64,
    mean_ns: f64,
    next: Duration,
}

impl Arrivals {
    /// Begins at time 0, with this mean time between two arrivals.
    pub fn of(mean: Duration, seed: u64) -> Arrivals {
        let mut arrivals = Arrivals {
            state: seed,
            mean_ns: mean.as_nanos() as f64,
            next: Duration::ZERO,
        };
        arrivals.advance();
        arrivals
    }

    fn advance(&mut self) {
        // A linear congruential generator (Knuth's constants); its upper bits are the random ones.
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let share = ((self.state >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
        self.next += Duration::from_nanos((-share.ln() * self.mean_ns) as u64);
    }
}

impl Iterator for Arrivals {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let now = self.next;
        self.advance();
        Some(now)
    }
}

/// Serves requests for this long, and appends the nanoseconds that each took from its arrival to `times`. Returns how many it
/// served, and how long it was busy.
pub fn serve(
    arrivals: &mut Arrivals,
    span: Duration,
    times: &mut Vec<u64>,
    mut request: impl FnMut(),
) -> (usize, Duration) {
    // Requests that arrived since the last span are not late: no server ran.
    arrivals.next = Duration::ZERO;
    arrivals.advance();
    let begin = Instant::now();
    let (mut served, mut busy) = (0, Duration::ZERO);
    for arrival in arrivals {
        if arrival >= span {
            break;
        }
        while begin.elapsed() < arrival {
            std::hint::spin_loop();
        }
        let from = begin.elapsed();
        request();
        let now = begin.elapsed();
        busy += now - from;
        served += 1;
        times.push(u64::try_from((now - arrival).as_nanos()).unwrap_or(u64::MAX));
        // An overloaded server would work for ever.
        if now >= span * 2 {
            break;
        }
    }
    (served, busy)
}

/// Returns the quantile of times for a share in [0, 1], and 0 without times. Orders them.
pub fn quantile(times: &mut [u64], share: f64) -> u64 {
    times.sort_unstable();
    let at = (share * times.len().saturating_sub(1) as f64).round() as usize;
    times.get(at).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_have_the_mean_that_was_asked_for_and_no_pattern() {
        let mean = Duration::from_micros(50);
        let all: Vec<Duration> = Arrivals::of(mean, 7).take(20_000).collect();
        let each: Vec<f64> = all
            .windows(2)
            .map(|pair| (pair[1] - pair[0]).as_secs_f64() / mean.as_secs_f64())
            .collect();
        let average = each.iter().sum::<f64>() / each.len() as f64;
        let squares = each.iter().map(|gap| (gap - average).powi(2)).sum::<f64>() / each.len() as f64;
        // Four standard deviations; an exponential distribution's is its mean.
        assert!((average - 1.0).abs() < 0.03, "{average}");
        assert!((squares.sqrt() - 1.0).abs() < 0.05, "{squares}");
    }

    #[test]
    fn a_request_that_waits_behind_a_slow_one_is_late_too() {
        let mut arrivals = Arrivals::of(Duration::from_millis(2), 3);
        let (mut times, mut first) = (Vec::new(), true);
        let (served, busy) = serve(&mut arrivals, Duration::from_millis(60), &mut times, || {
            if std::mem::take(&mut first) {
                std::thread::sleep(Duration::from_millis(30));
            }
        });
        assert_eq!(served, times.len());
        assert!(busy >= Duration::from_millis(30));
        let late = times.iter().filter(|time| **time > 2_000_000).count();
        assert!(late > 4, "{late} of {served}");
    }

    #[test]
    fn an_overloaded_server_ends() {
        let mut arrivals = Arrivals::of(Duration::from_micros(10), 3);
        let begin = Instant::now();
        serve(&mut arrivals, Duration::from_millis(20), &mut Vec::new(), || {
            std::thread::sleep(Duration::from_millis(1));
        });
        assert!(begin.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_times() {
        let mut times: Vec<u64> = (0..=100).rev().collect();
        assert_eq!((quantile(&mut times, 0.5), quantile(&mut times, 0.99)), (50, 99));
        assert_eq!(quantile(&mut [], 0.5), 0);
    }
}
