//! Time budget, repetitions and progress.

use std::time::{Duration, Instant};

use crate::stats::Spread;

/// Divides the remaining time evenly among the remaining steps. A step repeats its measurement at least
/// [`Meter::repeats_min`] times, however long that takes. Then it continues until its share of the time or
/// [`Meter::repeats_max`] is used up.
pub(crate) struct Meter<'a> {
    deadline: Instant,
    steps_left: usize,
    steps: usize,
    /// Least number of repetitions.
    pub repeats_min: usize,
    /// Maximum number of repetitions.
    pub repeats_max: usize,
    /// Duration of a single measurement.
    pub window: Duration,
    progress: &'a mut dyn FnMut(usize, usize, &str),
}

impl<'a> Meter<'a> {
    /// Creates a budget for a number of steps.
    pub(crate) fn new(
        budget: Duration,
        steps: usize,
        quick: bool,
        progress: &'a mut dyn FnMut(usize, usize, &str),
    ) -> Meter<'a> {
        Meter {
            deadline: Instant::now() + budget,
            steps_left: steps,
            steps,
            repeats_min: if quick { 3 } else { 5 },
            repeats_max: if quick { 5 } else { 15 },
            window: Duration::from_millis(if quick { 8 } else { 30 }),
            progress,
        }
    }

    /// Begins and announces a step. Returns the time until which the step may repeat its measurement.
    fn begin(&mut self, what: &str) -> Instant {
        (self.progress)(self.steps - self.steps_left + 1, self.steps, what);
        let now = Instant::now();
        let left = self.deadline.saturating_duration_since(now);
        let share = left / self.steps_left.max(1) as u32;
        self.steps_left = self.steps_left.saturating_sub(1).max(1);
        now + share
    }

    /// Runs one step: repeats a measurement of several values, and returns the spread of each. The result is empty if the
    /// measurement returns no values.
    ///
    /// # Errors
    /// The first error of the measurement.
    pub(crate) fn step_of<E>(
        &mut self,
        what: &str,
        mut measure: impl FnMut() -> Result<Vec<f64>, E>,
    ) -> Result<Vec<Spread>, E> {
        let until = self.begin(what);
        let mut columns: Vec<Vec<f64>> = Vec::new();
        let mut repeats = 0;
        while repeats < self.repeats_min || (repeats < self.repeats_max && Instant::now() < until) {
            let values = measure()?;
            columns.resize(values.len(), Vec::new());
            for (column, value) in columns.iter_mut().zip(values) {
                column.push(value);
            }
            repeats += 1;
        }
        Ok(columns.iter().filter_map(|column| Spread::of(column)).collect())
    }

    /// Runs one step, in which a single value is measured.
    pub(crate) fn step(&mut self, what: &str, mut measure: impl FnMut() -> f64) -> Spread {
        let one: Result<Vec<Spread>, std::convert::Infallible> = self.step_of(what, || Ok(vec![measure()]));
        let Ok(spreads) = one;
        // Without a finite value the result is 0, which the checks of a machine file reject.
        spreads.into_iter().next().unwrap_or(Spread {
            count: 0,
            min: 0.0,
            q1: 0.0,
            median: 0.0,
            q3: 0.0,
            max: 0.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_repeats_at_least_the_least_and_at_most_the_most() {
        let mut said = Vec::new();
        let mut progress = |at, of, what: &str| said.push((at, of, what.to_owned()));
        let mut meter = Meter::new(Duration::ZERO, 2, true, &mut progress);
        assert_eq!(meter.step("first", || 1.0).count, 3);
        meter.deadline = Instant::now() + Duration::from_secs(3600);
        assert_eq!(meter.step("second", || 1.0).count, 5);
        assert_eq!(said, [(1, 2, "first".to_owned()), (2, 2, "second".to_owned())]);
    }
}
