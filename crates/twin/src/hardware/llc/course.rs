//! The course of a class's lines over one step of a cache.

/// Solution of `dO/dt = entering - loss O` over a unit of time. `O` at its end and the mean of `O` are sums of the initial `O`
/// and of `entering` with these weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct Course {
    /// Share of the held lines that stay. The other weights follow from it.
    stay: f64,
    /// Mean over the time of the share of the held lines. It is also the share of the entering lines that stay.
    mean: f64,
    mean_of_entering: f64,
}

impl Course {
    /// Returns the exact solution.
    #[inline]
    pub(super) fn of(loss: f64) -> Course {
        if loss < 1e-3 {
            let mean = 1.0 - loss * (0.5 - loss * (1.0 / 6.0 - loss * (1.0 / 24.0)));
            return Course {
                stay: 1.0 - loss * mean,
                mean,
                mean_of_entering: 0.5 - loss * (1.0 / 6.0 - loss * (1.0 / 24.0)),
            };
        }
        let (stay, inverse) = (libm::exp(-loss), 1.0 / loss);
        let mean = (1.0 - stay) * inverse;
        Course {
            stay,
            mean,
            mean_of_entering: (1.0 - mean) * inverse,
        }
    }

    /// Returns the solution with the exponential approximated to within 0.03, at the cost of one division. For lines in use,
    /// whose loss is only an estimate.
    #[inline]
    pub(super) fn in_use(loss: f64) -> Course {
        let rise = 1.0 + loss * (0.5 + loss * (1.0 / 6.0));
        let stay = 1.0 / (1.0 + loss * rise);
        Course {
            stay,
            mean: rise * stay,
            mean_of_entering: (0.5 + loss * (1.0 / 3.0 + loss * (1.0 / 6.0))) * stay,
        }
    }

    /// Returns the lines at the end, and their mean.
    #[inline]
    pub(super) fn run(self, lines: f64, entering: f64) -> (f64, f64) {
        (
            lines * self.stay + entering * self.mean,
            lines * self.mean + entering * self.mean_of_entering,
        )
    }
}
