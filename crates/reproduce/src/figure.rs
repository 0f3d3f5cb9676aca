//! Figures in the shape of the original ones: as SVG with text elements, which needs no font, and as PNG with the library's
//! own font.
//!
//! There is one style. It is as wide as a column of a paper, so that its words are readable in print. Lines that overlap
//! differ in width and dashes. A bar without height has a 0; an unknown value has neither bar nor 0. A whisker spans the
//! minimum to the maximum of several runs.

use anyhow::{Error, Result};
use kuva::backend::png::PngBackend;
use kuva::backend::svg::SvgBackend;
use kuva::plot::annotations::{ReferenceLine, TextAnnotation};
use kuva::plot::line::LineStyle;
use kuva::plot::{BarPlot, LegendPosition, LinePlot};
use kuva::render::layout::Layout;
use kuva::render::plots::Plot;
use kuva::render::render::{Scene, collect_legend_entries, render_multiple};

/// Colours of series in order, distinguishable for the colour-blind (Paul Tol's bright and vibrant schemes). Published
/// values are grey in any series.
const COLOURS: [&str; 9] = [
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#000000", "#009988",
];
const PUBLISHED: &str = "#999999";
/// Size of a drawing in units; a column of a paper is about as many units of 1/96 inch wide.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 330.0;
/// Font sizes, in the same units, and the maximum width of a letter.
const WORDS: u32 = 11;
const SMALL: u32 = 9;
const LETTER: f64 = 5.6;
/// Width left for the axis of the bars.
const AXIS: f64 = WIDTH - 70.0;
/// Height of each line of the legend, which is at the bottom.
const LEGEND_LINE: f64 = 18.0;
/// Pixels of a PNG per unit: about 300 per inch.
const PNG_SCALE: f32 = 3.0;
/// Width of a group of bars, as a share of the distance between groups.
const GROUP: f64 = 0.8;

/// A figure of one claim.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Name of the figure's file, without extension.
    pub name: String,
    /// The figure's subject.
    pub title: String,
    /// Label of the horizontal axis.
    pub x_label: String,
    /// Label of the vertical axis.
    pub y_label: String,
    /// The data.
    pub shape: Shape,
    /// Vertical lines: their positions on the horizontal axis, and their names.
    pub marks: Vec<(f64, String)>,
}

/// A number. If it stands for several runs, it has their minimum and maximum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranged {
    /// The number.
    pub value: f64,
    /// Minimum and maximum.
    pub range: Option<(f64, f64)>,
}

impl From<f64> for Ranged {
    fn from(value: f64) -> Ranged {
        Ranged { value, range: None }
    }
}

impl Ranged {
    fn is_drawn(&self) -> bool {
        self.value.is_finite()
    }

    /// Returns the length of the whisker below and above; 0 without a range.
    fn whisker(&self) -> (f64, f64) {
        let (low, high) = self.range.unwrap_or((self.value, self.value));
        let length = |length: f64| if length.is_finite() { length.max(0.0) } else { 0.0 };
        (length(self.value - low), length(high - self.value))
    }
}

/// A line's name and points.
pub(crate) type Line = (String, Vec<(f64, Ranged)>);

/// Kinds of figures.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// Groups of bars: the categories, and for each series its name and one value per category. `None` is an unknown value.
    Bars(Vec<String>, Vec<(String, Vec<Option<Ranged>>)>),
    /// Lines through points.
    Lines(Vec<Line>),
}

/// Prefix in the names of series with published values.
pub(crate) const PUBLISHED_SERIES: &str = "published";

impl Figure {
    /// Returns the figure as SVG. The same figure yields the same bytes.
    pub fn svg(&self) -> String {
        renumbered(&SvgBackend::default().render_scene(&self.scene()))
    }

    /// Returns the figure as PNG. As wide as a column, the figure has 300 pixels per inch.
    ///
    /// # Errors
    /// The encoding failed.
    pub fn png(&self) -> Result<Vec<u8>> {
        PngBackend::new()
            .with_scale(PNG_SCALE)
            .render_scene(&self.scene())
            .map_err(Error::msg)
    }

    fn scene(&self) -> Scene {
        let (plots, names) = match &self.shape {
            Shape::Bars(categories, series) => (vec![bars(categories, series)], names(series)),
            Shape::Lines(series) => (lines(series), names(series)),
        };
        // If a name is too long for half of the width, each name gets its own line.
        let columns = if names.iter().all(|name| letters(name) < AXIS / 2.0 - 30.0) {
            2
        } else {
            1
        };
        let legend = names.len().div_ceil(columns) as f64 * LEGEND_LINE;
        let mut layout = Layout::auto_from_plots(&plots)
            .with_title(&self.title)
            .with_title_wrap((AXIS / LETTER / 1.1) as usize)
            .with_x_label(&self.x_label)
            .with_y_label(&self.y_label)
            .with_title_size(WORDS + 1)
            .with_label_size(WORDS)
            .with_tick_size(SMALL)
            .with_body_size(SMALL + 1)
            .with_width(WIDTH)
            // The library itself would count plots, and all bars are one plot.
            .with_legend_entries(collect_legend_entries(&plots))
            .with_legend_position(LegendPosition::OutsideBottomColumns)
            .with_legend_col_limit(columns)
            .with_legend_box(false);
        for (x, name) in &self.marks {
            layout = layout
                .with_reference_line(ReferenceLine::vertical(*x).with_color(PUBLISHED).with_label(name));
        }
        let mut height = HEIGHT + legend;
        if let Shape::Bars(categories, series) = &self.shape {
            if !fits(categories) {
                layout = layout.with_x_tick_rotate(-45.0);
                let longest = categories.iter().map(|name| letters(name)).fold(0.0, f64::max);
                height += longest * 0.6;
            }
            for (x, text) in zeros(categories.len(), series) {
                layout = layout.with_annotation(TextAnnotation::new(text, x, 0.0).with_font_size(SMALL));
            }
        }
        render_multiple(plots, layout.with_height(height))
    }
}

fn letters(text: &str) -> f64 {
    text.chars().count() as f64 * LETTER
}

/// Returns true if the names fit next to each other below their groups.
fn fits(categories: &[String]) -> bool {
    let room = AXIS / categories.len().max(1) as f64;
    categories.iter().all(|name| letters(name) < room)
}

fn names<T>(series: &[(String, T)]) -> Vec<&String> {
    series.iter().map(|(name, _)| name).collect()
}

/// Returns the places of bars without visible height, and their labels. Empty if bars are narrower than a digit.
fn zeros(groups: usize, series: &[(String, Vec<Option<Ranged>>)]) -> Vec<(f64, &'static str)> {
    let drawn = || {
        series
            .iter()
            .flat_map(|(_, values)| values)
            .flatten()
            .filter(|value| value.is_drawn())
    };
    let greatest = drawn().map(|value| value.value.abs()).fold(0.0, f64::max);
    let width = GROUP / series.len().max(1) as f64;
    let mut found = Vec::new();
    if AXIS * width < LETTER * groups as f64 {
        return found;
    }
    for group in 0..groups {
        for (at, (_, values)) in series.iter().enumerate() {
            let value = values.get(group).copied().flatten().filter(Ranged::is_drawn);
            if value.is_some_and(|value| value.value.abs() <= greatest / 200.0) {
                found.push((group as f64 + 1.0 - GROUP / 2.0 + width * (at as f64 + 0.5), "0"));
            }
        }
    }
    found
}

/// Renumbers clip paths, which the library numbers across figures, so that each figure starts at 0.
fn renumbered(svg: &str) -> String {
    const CLIP: &str = "kuva-clip-";
    let mut parts = svg.split(CLIP);
    let mut text = parts.next().unwrap_or_default().to_owned();
    let mut seen: Vec<&str> = Vec::new();
    for part in parts {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        let (number, rest) = part.split_at(digits);
        let at = seen.iter().position(|one| *one == number).unwrap_or_else(|| {
            seen.push(number);
            seen.len() - 1
        });
        text += &format!("{CLIP}{at}{rest}");
    }
    text
}

fn colours<'a>(names: impl Iterator<Item = &'a String>) -> Vec<&'static str> {
    let mut ours = COLOURS.iter().cycle();
    names
        .map(|name| {
            if name.starts_with(PUBLISHED_SERIES) {
                PUBLISHED
            } else {
                ours.next().expect("a cycle has no end")
            }
        })
        .collect()
}

fn bars(categories: &[String], series: &[(String, Vec<Option<Ranged>>)]) -> Plot {
    let colours = colours(series.iter().map(|(name, _)| name));
    let mut plot = BarPlot::new().with_width(GROUP);
    let mut whiskers = Vec::new();
    for (at, category) in categories.iter().enumerate() {
        let values = series.iter().zip(&colours).map(|((_, values), colour)| {
            let value = values.get(at).copied().flatten().filter(Ranged::is_drawn);
            let value = value.unwrap_or(Ranged::from(0.0));
            whiskers.push(value.whisker());
            (value.value, *colour)
        });
        plot = plot.with_group(category, values.collect::<Vec<(f64, &str)>>());
    }
    if whiskers.iter().any(|whisker| *whisker != (0.0, 0.0)) {
        plot = plot.with_asymmetric_error(whiskers);
    }
    Plot::Bar(plot.with_legend(series.iter().map(|(name, _)| name.as_str()).collect()))
}

/// Returns the lines. The first is the widest, so that it is visible on both sides of lines that overlap it.
fn lines(series: &[Line]) -> Vec<Plot> {
    let colours = colours(series.iter().map(|(name, _)| name));
    let count = series.len();
    let line = |(at, ((name, points), colour)): (usize, (&Line, &&str))| {
        let style = match at % 4 {
            0 => LineStyle::Solid,
            1 => LineStyle::Dashed,
            2 => LineStyle::DashDot,
            _ => LineStyle::Dotted,
        };
        let drawn = || points.iter().filter(|(x, y)| x.is_finite() && y.is_drawn());
        let mut line = LinePlot::new()
            .with_data(drawn().map(|(x, y)| (*x, y.value)))
            .with_color(*colour)
            .with_line_style(style)
            .with_stroke_width(1.4 + 0.9 * (count - 1 - at) as f64);
        if drawn().any(|(_, y)| y.range.is_some()) {
            line = line.with_y_err_asymmetric(drawn().map(|(_, y)| y.whisker()));
        }
        Plot::Line(line.with_legend(name))
    };
    series.iter().zip(&colours).enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> [Figure; 2] {
        let names = ["ep.B", "cg.B", "a<b & c"].map(str::to_owned).to_vec();
        let spread = Ranged {
            value: 22.5,
            range: Some((20.0, 30.0)),
        };
        let ours = vec![Some(1.0.into()), Some(spread), None];
        let published = vec![Some(1.2.into()), Some(f64::NAN.into()), Some(0.0.into())];
        let bars = Shape::Bars(
            names,
            vec![("ours".into(), ours), ("published".into(), published)],
        );
        let lines = Shape::Lines(vec![("ours".into(), vec![(1.0, 0.1.into()), (32.0, 0.3.into())])]);
        [bars, lines].map(|shape| Figure {
            name: "figure".into(),
            title: "Runtime \"by\" program".into(),
            x_label: "program".into(),
            y_label: "percent".into(),
            shape,
            marks: vec![(2.0, "a mark".into())],
        })
    }

    #[test]
    fn figures_are_well_formed_and_carry_their_words_as_text() {
        for figure in figures() {
            let svg = figure.svg();
            let mut reader = quick_xml::Reader::from_str(&svg);
            let (mut texts, mut all) = (0, String::new());
            loop {
                match reader.read_event().unwrap() {
                    quick_xml::events::Event::Eof => break,
                    quick_xml::events::Event::Start(start) => {
                        texts += usize::from(start.name().as_ref() == "text");
                    }
                    quick_xml::events::Event::Text(text) => all.push_str(&text),
                    _ => {}
                }
            }
            assert!(texts > 5, "{texts}");
            assert!(all.contains("ours") && all.contains("percent"), "{all}");
            assert!(all.contains("a mark"), "{all}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn the_same_figure_gives_the_same_bytes() {
        for figure in figures() {
            assert_eq!(figure.svg(), figure.clone().svg());
        }
    }

    #[test]
    fn a_bar_of_nothing_has_a_zero_and_what_is_not_known_has_none() {
        let Shape::Bars(categories, series) = &figures()[0].shape else {
            panic!("bars")
        };
        let found = zeros(categories.len(), series);
        assert_eq!(found.len(), 1);
        // The third group's second bar.
        assert!((3.0..3.4).contains(&found[0].0), "{found:?}");
    }

    #[test]
    fn every_name_of_the_legend_is_within_the_figure() {
        for count in 1..9 {
            let names = (0..count).map(|at| format!("series {at}"));
            let series = names.map(|name| (name, vec![Some(1.0.into())])).collect();
            let figure = Figure {
                shape: Shape::Bars(vec!["only".into()], series),
                ..figures()[0].clone()
            };
            let svg = figure.svg();
            let number = |text: &str, key: &str| -> f64 {
                let (_, rest) = text.split_once(key).unwrap();
                rest.split_once('"').unwrap().0.parse().unwrap()
            };
            let height = number(&svg, "height=\"");
            let lowest = svg
                .split("<text ")
                .filter(|text| text.contains(">series "))
                .map(|text| number(text, " y=\""))
                .fold(0.0, f64::max);
            assert!((1.0..height).contains(&lowest), "{count}: {lowest} of {height}");
        }
    }

    #[test]
    fn no_two_series_look_alike() {
        let names: Vec<String> = (0..9).map(|at| at.to_string()).collect();
        let mut of = colours(names.iter());
        of.sort_unstable();
        of.dedup();
        assert_eq!(of.len(), 9);
    }

    #[test]
    fn a_png_has_the_points_of_a_column_at_300_an_inch() {
        let png = figures()[0].png().unwrap();
        assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
        let width = u32::from_be_bytes([png[16], png[17], png[18], png[19]]);
        assert_eq!(width, (WIDTH * f64::from(PNG_SCALE)) as u32);
    }

    #[test]
    fn published_series_are_grey() {
        let names = ["default", "published", "homenode"].map(str::to_owned);
        assert_eq!(colours(names.iter()), [COLOURS[0], PUBLISHED, COLOURS[1]]);
    }
}
