//! The two text formats that Prometheus reads: its own, version 0.0.4, and OpenMetrics 1.0.0.
//!
//! Written by hand, because existing libraries write only one of the two formats, and keep series for the life of the program.
//! Here series come and go with VMs, and their number is limited.

use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Most series in one answer.
const SERIES_MAX: usize = 20_000;

/// A text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Prometheus' own, 0.0.4.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl Format {
    /// Returns the format that an `Accept` header prefers.
    pub(crate) fn wanted(accept: &str) -> Format {
        let weight = |name: &str| {
            let mut best = 0.0_f64;
            for part in accept.split(',') {
                let mut fields = part.split(';').map(str::trim);
                if fields.next().is_some_and(|kind| kind.eq_ignore_ascii_case(name)) {
                    let weight = fields.find_map(|field| field.strip_prefix("q="));
                    best = best.max(weight.map_or(1.0, |weight| weight.parse().unwrap_or(0.0)));
                }
            }
            best
        };
        let open = weight("application/openmetrics-text");
        if open > 0.0 && open >= weight("text/plain") {
            Format::OpenMetrics
        } else {
            Format::Text
        }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Only grows while the agent runs.
    Counter,
    /// A current value.
    Gauge,
    /// A constant 1 whose labels carry names.
    Info,
    /// A distribution of durations.
    Histogram,
}

impl Kind {
    /// Returns the type's name as in the documentation's table.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Info => "info",
            Kind::Histogram => "histogram",
        }
    }
}

/// A metric, declared once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Family {
    /// The metric's name, with the suffix that its type requires.
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

/// Links a counter's last increment to the record of what was counted. Only OpenMetrics supports this.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Exemplar {
    pub label: &'static str,
    pub id: String,
    /// When the increment was counted: wall-clock time, in seconds since 1970.
    pub at_s: f64,
}

/// An answer that is being written.
pub(crate) struct Exposition {
    format: Format,
    text: String,
    series_count: usize,
    dropped_count: usize,
}

impl Exposition {
    pub(crate) fn new(format: Format) -> Exposition {
        Exposition {
            format,
            text: String::new(),
            series_count: 0,
            dropped_count: 0,
        }
    }

    /// Writes a family, or nothing if it has no series. An empty label is the same as no label. If several series have the same
    /// labels, such as two VMs with one name, writes only the first: readers refuse an answer with duplicates.
    pub(crate) fn family<const N: usize>(
        &mut self,
        family: &Family,
        series: impl IntoIterator<Item = ([String; N], f64)>,
    ) {
        let bare = |(labels, value)| (labels, value, None);
        self.family_with_exemplars(family, series.into_iter().map(bare));
    }

    /// Writes a counter family whose series may have exemplars.
    pub(crate) fn family_with_exemplars<const N: usize>(
        &mut self,
        family: &Family,
        series: impl IntoIterator<Item = ([String; N], f64, Option<Exemplar>)>,
    ) {
        debug_assert_eq!(family.labels.len(), N, "{}", family.name);
        let mut there = BTreeSet::new();
        let mut has_head = false;
        for (labels, value, exemplar) in series {
            if there.contains(&labels) || !self.has_room() {
                continue;
            }
            if !std::mem::replace(&mut has_head, true) {
                self.head(family);
            }
            let named = family.labels.iter().copied();
            let labels_named = named.zip(labels.iter().map(String::as_str));
            self.line(family.name, labels_named, value, exemplar.as_ref());
            there.insert(labels);
        }
    }

    /// Writes one value without labels, regardless of the limit.
    pub(crate) fn always(&mut self, family: &Family, value: f64) {
        self.head(family);
        self.line(family.name, std::iter::empty(), value, None);
    }

    /// Writes histograms. Counts are per bucket, not cumulative; the last bucket has no upper bound.
    pub(crate) fn histograms<'a>(
        &mut self,
        family: &Family,
        ends: &[f64],
        series: impl IntoIterator<Item = (&'static str, &'a [u64], f64)>,
    ) {
        let mut has_head = false;
        for (label, counts, sum) in series {
            if !std::mem::replace(&mut has_head, true) {
                self.head(family);
            }
            let (bucket, mut so_far) = (format!("{}_bucket", family.name), 0);
            let ends = ends.iter().map(|end| number(*end)).chain(["+Inf".to_owned()]);
            for (end, count) in ends.zip(counts) {
                so_far += count;
                let labels = [(family.labels[0], label), ("le", end.as_str())];
                self.line(&bucket, labels.into_iter(), so_far as f64, None);
            }
            self.line(
                &format!("{}_sum", family.name),
                [(family.labels[0], label)].into_iter(),
                sum,
                None,
            );
            let labels = [(family.labels[0], label)].into_iter();
            self.line(&format!("{}_count", family.name), labels, so_far as f64, None);
            self.series_count += counts.len() + 2;
        }
    }

    /// Returns how many series were dropped because of the limit.
    pub(crate) fn dropped_count(&self) -> usize {
        self.dropped_count
    }

    /// Returns the whole answer.
    pub(crate) fn finish(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }

    fn has_room(&mut self) -> bool {
        let has_room = self.series_count < SERIES_MAX;
        if has_room {
            self.series_count += 1;
        } else {
            self.dropped_count += 1;
        }
        has_room
    }

    fn head(&mut self, family: &Family) {
        let (name, kind) = match (self.format, family.kind) {
            (Format::OpenMetrics, Kind::Counter) => (family.name.trim_end_matches("_total"), "counter"),
            (Format::OpenMetrics, Kind::Info) => (family.name.trim_end_matches("_info"), "info"),
            (Format::Text, Kind::Info) => (family.name, "gauge"),
            (_, kind) => (family.name, kind.name()),
        };
        let _ = writeln!(self.text, "# HELP {name} {}\n# TYPE {name} {kind}", family.help);
    }

    fn line<'a>(
        &mut self,
        name: &str,
        labels: impl Iterator<Item = (&'a str, &'a str)>,
        value: f64,
        exemplar: Option<&Exemplar>,
    ) {
        self.text.push_str(name);
        self.labels(labels);
        let _ = write!(self.text, " {}", number(value));
        if let Some(Exemplar { label, id, at_s }) = exemplar.filter(|_| self.format == Format::OpenMetrics) {
            self.text.push_str(" # ");
            self.labels([(*label, id.as_str())].into_iter());
            let _ = write!(self.text, " 1 {}", number(*at_s));
        }
        self.text.push('\n');
    }

    /// Writes the labels that are not empty, or not even braces if all are empty.
    fn labels<'a>(&mut self, labels: impl Iterator<Item = (&'a str, &'a str)>) {
        let mut between = '{';
        for (key, value) in labels.filter(|(_, value)| !value.is_empty()) {
            let _ = write!(self.text, "{between}{key}=\"");
            for c in value.chars() {
                match c {
                    '\\' => self.text.push_str("\\\\"),
                    '"' => self.text.push_str("\\\""),
                    '\n' => self.text.push_str("\\n"),
                    c => self.text.push(c),
                }
            }
            self.text.push('"');
            between = ',';
        }
        if between == ',' {
            self.text.push('}');
        }
    }
}

/// Formats a value in the way that both formats require.
fn number(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".into(),
        f64::INFINITY => "+Inf".into(),
        f64::NEG_INFINITY => "-Inf".into(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOVED: Family = Family {
        name: "moved_bytes_total",
        kind: Kind::Counter,
        labels: &["domain", "from"],
        help: "Bytes.",
    };

    #[test]
    fn each_format_has_its_own_head_and_end() {
        let of = |format| {
            let mut text = Exposition::new(format);
            text.family(&MOVED, [(["a \"\\\n".to_owned(), String::new()], 4096.0)]);
            text.finish()
        };
        assert_eq!(
            of(Format::Text),
            "# HELP moved_bytes_total Bytes.\n# TYPE moved_bytes_total counter\nmoved_bytes_total{domain=\"a \\\"\\\\\\n\"} 4096\n"
        );
        assert_eq!(
            of(Format::OpenMetrics),
            "# HELP moved_bytes Bytes.\n# TYPE moved_bytes counter\nmoved_bytes_total{domain=\"a \\\"\\\\\\n\"} 4096\n# EOF\n"
        );
    }

    #[test]
    fn a_counter_names_one_of_what_it_counted_where_the_format_has_a_place_for_it() {
        let of = |format| {
            let mut text = Exposition::new(format);
            let exemplar = Exemplar {
                label: "decision_id",
                id: "17".into(),
                at_s: 1.5,
            };
            let series = [
                (["a".to_owned(), String::new()], 4096.0, Some(exemplar)),
                (["b".to_owned(), String::new()], 1.0, None),
            ];
            text.family_with_exemplars(&MOVED, series);
            text.finish()
        };
        let open = of(Format::OpenMetrics);
        assert_eq!(
            open.lines().skip(2).collect::<Vec<_>>(),
            [
                "moved_bytes_total{domain=\"a\"} 4096 # {decision_id=\"17\"} 1 1.5",
                "moved_bytes_total{domain=\"b\"} 1",
                "# EOF"
            ]
        );
        assert!(!of(Format::Text).contains("decision_id"));
    }

    #[test]
    fn no_series_is_there_twice() {
        let mut text = Exposition::new(Format::Text);
        let series = ["a", "b", "a"].map(|name| ([name.to_owned(), String::new()], 1.0));
        text.family(&MOVED, series);
        assert_eq!(text.finish().lines().count(), 2 + 2);
    }

    #[test]
    fn what_finds_no_room_is_counted_and_a_family_without_series_is_absent() {
        let mut text = Exposition::new(Format::Text);
        text.family(&MOVED, std::iter::empty::<([String; 2], f64)>());
        assert_eq!(text.text, "");
        let series = (0..SERIES_MAX + 7).map(|n| ([n.to_string(), String::new()], 1.0));
        text.family(&MOVED, series);
        assert_eq!(text.dropped_count(), 7);
        assert_eq!(text.finish().lines().count(), SERIES_MAX + 2);
    }

    #[test]
    fn the_format_is_the_one_that_is_wanted_most() {
        for (accept, format) in [
            ("", Format::Text),
            ("*/*", Format::Text),
            ("text/plain", Format::Text),
            ("application/openmetrics-text", Format::OpenMetrics),
            (
                "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                Format::OpenMetrics,
            ),
            (
                "text/plain;q=0.9, application/openmetrics-text;q=0.1",
                Format::Text,
            ),
            ("application/openmetrics-text;q=0", Format::Text),
            ("application/openmetrics-text;q=x", Format::Text),
        ] {
            assert_eq!(Format::wanted(accept), format, "{accept}");
        }
    }
}
