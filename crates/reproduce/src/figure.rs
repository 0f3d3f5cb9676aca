//! Figures in the shape of the originals, as SVG with text elements: no font is needed to draw them.

use kuva::backend::svg::SvgBackend;
use kuva::plot::{BarPlot, LinePlot};
use kuva::render::layout::Layout;
use kuva::render::plots::Plot;
use kuva::render::render::render_multiple;

/// Colours of series in their order; what was published is grey, whichever series it is.
const COLOURS: [&str; 7] = [
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#000000",
];
const PUBLISHED: &str = "#999999";
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;

/// A figure of one claim.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Name of its file, without ending.
    pub name: String,
    /// What it shows.
    pub title: String,
    /// Horizontal axis.
    pub x_label: String,
    /// Vertical axis.
    pub y_label: String,
    /// What is drawn.
    pub shape: Shape,
}

/// A line's name and points.
pub type Line = (String, Vec<(f64, f64)>);

/// Kinds of figures.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// Groups of bars: categories, and for each series its name and a value per category. What is not known has no height.
    Bars(Vec<String>, Vec<(String, Vec<Option<f64>>)>),
    /// Lines through points.
    Lines(Vec<Line>),
}

/// Name with which series of published values begin.
pub const PUBLISHED_SERIES: &str = "published";

impl Figure {
    /// The figure as SVG. The same figure gives the same bytes.
    pub fn svg(&self) -> String {
        let plots = match &self.shape {
            Shape::Bars(categories, series) => vec![bars(categories, series)],
            Shape::Lines(series) => lines(series),
        };
        let mut layout = Layout::auto_from_plots(&plots)
            .with_title(&self.title)
            .with_x_label(&self.x_label)
            .with_y_label(&self.y_label)
            .with_width(WIDTH)
            .with_height(HEIGHT);
        if matches!(&self.shape, Shape::Bars(categories, _) if categories.len() > 10) {
            layout = layout.with_x_tick_rotate(-45.0);
        }
        renumbered(&SvgBackend::default().render_scene(&render_multiple(plots, layout)))
    }
}

/// The library numbers clip paths through the process; here each figure begins anew.
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

fn bars(categories: &[String], series: &[(String, Vec<Option<f64>>)]) -> Plot {
    let colours = colours(series.iter().map(|(name, _)| name));
    let mut plot = BarPlot::new();
    for (at, category) in categories.iter().enumerate() {
        let values = series.iter().zip(&colours).map(|((_, values), colour)| {
            let value = values
                .get(at)
                .copied()
                .flatten()
                .filter(|value| value.is_finite());
            (value.unwrap_or(0.0), *colour)
        });
        plot = plot.with_group(category, values.collect::<Vec<(f64, &str)>>());
    }
    Plot::Bar(plot.with_legend(series.iter().map(|(name, _)| name.as_str()).collect()))
}

fn lines(series: &[Line]) -> Vec<Plot> {
    let colours = colours(series.iter().map(|(name, _)| name));
    let line = |((name, points), colour): (&Line, &&str)| {
        let line = LinePlot::new()
            .with_data(points.iter().copied())
            .with_color(*colour);
        Plot::Line(line.with_legend(name))
    };
    series.iter().zip(&colours).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> [Figure; 2] {
        let names = ["ep.B", "cg.B", "a<b & c"].map(str::to_owned).to_vec();
        let ours = vec![Some(1.0), Some(22.5), None];
        let published = vec![Some(1.2), Some(f64::NAN), Some(3.0)];
        let bars = Shape::Bars(
            names,
            vec![("ours".into(), ours), ("published".into(), published)],
        );
        let lines = Shape::Lines(vec![("ours".into(), vec![(1.0, 0.1), (32.0, 0.3)])]);
        [bars, lines].map(|shape| Figure {
            name: "figure".into(),
            title: "Runtime \"by\" program".into(),
            x_label: "program".into(),
            y_label: "percent".into(),
            shape,
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
    fn published_series_are_grey() {
        let names = ["default", "published", "homenode"].map(str::to_owned);
        assert_eq!(colours(names.iter()), [COLOURS[0], PUBLISHED, COLOURS[1]]);
    }
}
