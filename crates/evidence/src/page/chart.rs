//! Strips that show repetitions, their interval and what was predicted, on one scale for figures of one unit.
//!
//! Text is HTML and positions are shares of the width, so a strip can be read at any width.

use maud::{Markup, html};

use crate::number::number;

/// From this ratio of greatest to least on, a scale is logarithmic.
const LOGARITHMIC_FROM: f64 = 100.0;
/// Share of the width that is left free at both ends, in percent.
const MARGIN: f64 = 1.5;

/// What a strip shows.
#[derive(Clone, Debug, Default)]
pub(super) struct Strip<'a> {
    /// Its label.
    pub(super) label: String,
    /// What is written at its end.
    pub(super) value: String,
    /// Single repetitions.
    pub(super) dots: &'a [f64],
    /// The interval.
    pub(super) interval: Option<(f64, f64)>,
    /// The middle.
    pub(super) middle: Option<f64>,
    /// What was predicted.
    pub(super) predicted: Option<f64>,
}

impl Strip<'_> {
    fn numbers(&self) -> impl Iterator<Item = f64> {
        let ends = self.interval.map(|(low, high)| [low, high]).into_iter().flatten();
        let marks = [self.middle, self.predicted].into_iter().flatten();
        let all = self.dots.iter().copied().chain(ends).chain(marks);
        all.filter(|number| number.is_finite())
    }
}

/// A scale from the left to the right end of a strip.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scale {
    low: f64,
    high: f64,
    is_logarithmic: bool,
}

impl Scale {
    /// Chooses the scale of numbers. It begins at 0 unless it is logarithmic or a number is negative.
    fn of(numbers: impl Iterator<Item = f64>) -> Scale {
        let (low, high) = numbers.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), number| {
            (low.min(number), high.max(number))
        });
        let is_logarithmic = low > 0.0 && high / low >= LOGARITHMIC_FROM;
        let (low, high) = match is_logarithmic {
            true => (low, high),
            false => (low.min(0.0), high.max(0.0)),
        };
        match low < high {
            true => Scale {
                low,
                high,
                is_logarithmic,
            },
            false => Scale {
                low: 0.0,
                high: 1.0,
                is_logarithmic: false,
            },
        }
    }

    /// Returns where a number is, as a share of the width.
    fn place(self, number: f64) -> String {
        let share = match self.is_logarithmic {
            true => (number / self.low).ln() / (self.high / self.low).ln(),
            // Halved, as the difference of two great numbers may not be finite.
            false => (number / 2.0 - self.low / 2.0) / (self.high / 2.0 - self.low / 2.0),
        };
        format!("{:.2}%", MARGIN + (100.0 - 2.0 * MARGIN) * share.clamp(0.0, 1.0))
    }
}

/// Draws strips on one scale.
pub(super) fn chart(unit: &str, strips: &[Strip<'_>]) -> Markup {
    let scale = Scale::of(strips.iter().flat_map(Strip::numbers));
    html! {
        figure {
            @for strip in strips {
                div.row {
                    div { span { (strip.label) } b { (strip.value) } }
                    (drawn(strip, scale))
                }
            }
            div.axis {
                span { (number(scale.low)) }
                span { @if scale.is_logarithmic { "logarithmic" } }
                span { (number(scale.high)) " " (unit) }
            }
        }
    }
}

fn drawn(strip: &Strip<'_>, scale: Scale) -> Markup {
    let x = |number: f64| scale.place(number);
    html! {
        svg.strip role="img" aria-label=(format!("{}: {}", strip.label, strip.value)) {
            @if scale.low < 0.0 { line.zero x1=(x(0.0)) x2=(x(0.0)) y1="0" y2="22" {} }
            @if let Some((low, high)) = strip.interval { line.interval x1=(x(low)) x2=(x(high)) y1="11" y2="11" {} }
            @for dot in strip.dots { circle.raw-dot cx=(x(*dot)) cy="11" r="2.5" {} }
            @if let Some(predicted) = strip.predicted { line.predicted x1=(x(predicted)) x2=(x(predicted)) y1="1" y2="21" {} }
            @if let Some(middle) = strip.middle { circle.median cx=(x(middle)) cy="11" r="5" {} }
        }
    }
}

/// Explains the marks.
pub(super) fn key() -> Markup {
    html! {
        p.key {
            span { svg { circle.median cx="13" cy="7" r="5" {} } " median" }
            span { svg { line.interval x1="1" x2="25" y1="7" y2="7" {} } " 95 % interval" }
            span { svg { circle.raw-dot cx="13" cy="7" r="2.5" {} } " one repetition" }
            span { svg { line.predicted x1="13" x2="13" y1="0" y2="14" {} } " predicted" }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_begins_at_zero_unless_it_is_logarithmic_or_goes_below() {
        let of = |numbers: &[f64]| Scale::of(numbers.iter().copied());
        let scale = |low, high, is_logarithmic| Scale {
            low,
            high,
            is_logarithmic,
        };
        assert_eq!(of(&[20.0, 40.0]), scale(0.0, 40.0, false));
        assert_eq!(of(&[-3.0, 4.0]), scale(-3.0, 4.0, false));
        assert_eq!(of(&[-3.0, -4.0]), scale(-4.0, 0.0, false));
        assert_eq!(of(&[1.0, 100.0]), scale(1.0, 100.0, true));
        for none in [&[][..], &[0.0], &[f64::MAX, f64::MIN]] {
            assert!(
                of(none).place(0.5).ends_with('%') && !of(none).place(0.5).contains("NaN"),
                "{none:?}"
            );
        }
        assert_eq!(of(&[-1.0, 1.0]).place(0.0), "50.00%");
        assert_eq!(of(&[1.0, 100.0]).place(10.0), "50.00%");
    }
}
