//! Miss-ratio curves: three numbers that select a curve of a family, or a table of points.
//!
//! # Model
//!
//! The family is `m(c) = m_inf + (1 - m_inf) * exp(-(c / c0)^k)`: one part of a program's data is reused, and one part is not. A
//! table has points of capacity and miss ratio as measured. It is for programs with several parts (steps), and for curves that
//! bend in other ways than the family's. Between two points the ratio is linear in the capacity, as it is between no cache (which
//! always misses) and the first point. Beyond the last point it is constant.

use std::borrow::Cow;

use homenode_machine::notation;
use homenode_units::Bytes;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::{FittedCurve, Wrong, a_share, above_0};

/// Most points of a table. A measured curve has about a hundred.
const POINTS_MAX: usize = 1024;
/// Approximate number of these points to which the nearest curve of the family is fitted.
const FITTED_MAX: usize = 64;

/// Share of accesses that miss, as a function of capacity. In files `{ m_inf = 0.1, c0 = "4MiB", k = 1.0 }` or
/// `{ table = [["256KiB", 0.9], ["8MiB", 0.1]] }`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct MissRatioCurve {
    /// Miss ratio in a cache that holds all data that is ever reused, in [0, 1].
    pub m_inf: f64,
    /// Capacity at which the reuse part has fallen to 1/e.
    pub c0: Bytes,
    /// Steepness: a value below 1 gives a long tail, above 2 a cliff.
    pub k: f64,
    /// Points, which define the curve if present. The three numbers above are then the nearest curve of the family, for callers
    /// that need these numbers.
    table: Option<Vec<Point>>,
}

/// A capacity and the miss ratio at it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Point(#[serde(with = "homenode_units::text")] Bytes, f64);

/// A curve as files write it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    m_inf: Option<f64>,
    #[serde(
        default,
        with = "homenode_units::text::option",
        skip_serializing_if = "Option::is_none"
    )]
    c0: Option<Bytes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    k: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    table: Option<Vec<Point>>,
}

/// The reason why keys of a file do not describe a curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum CurveError {
    #[error("key `{0}` is missing: a curve has `m_inf`, `c0` and `k`, or a `table`")]
    Missing(&'static str),
    #[error("`table` is given together with `m_inf`, `c0` or `k`: a curve has one or the other")]
    Both,
}

impl TryFrom<Written> for MissRatioCurve {
    type Error = CurveError;

    fn try_from(written: Written) -> Result<MissRatioCurve, CurveError> {
        match written {
            Written {
                m_inf: None,
                c0: None,
                k: None,
                table: Some(table),
            } => Ok(MissRatioCurve::of_points(table)),
            Written { table: Some(_), .. } => Err(CurveError::Both),
            Written { m_inf, c0, k, .. } => Ok(MissRatioCurve::family(
                m_inf.ok_or(CurveError::Missing("m_inf"))?,
                c0.ok_or(CurveError::Missing("c0"))?,
                k.ok_or(CurveError::Missing("k"))?,
            )),
        }
    }
}

impl From<MissRatioCurve> for Written {
    fn from(curve: MissRatioCurve) -> Written {
        let of_family = curve.table.is_none();
        Written {
            m_inf: of_family.then_some(curve.m_inf),
            c0: of_family.then_some(curve.c0),
            k: of_family.then_some(curve.k),
            table: curve.table,
        }
    }
}

impl JsonSchema for MissRatioCurve {
    fn schema_name() -> Cow<'static, str> {
        "MissRatioCurve".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let size = generator.subschema_for::<notation::Size>();
        json_schema!({
            "description": "Share of accesses that miss, by capacity: three numbers of a family, or a table of points.",
            "anyOf": [
                {
                    "description": "`m(c) = m_inf + (1 - m_inf) * exp(-(c / c0)^k)`.",
                    "type": "object",
                    "properties": {
                        "m_inf": {
                            "description": "Miss ratio in a cache that holds all that is ever reused, in [0, 1].",
                            "type": "number"
                        },
                        "c0": size,
                        "k": {
                            "description": "Steepness: below 1 a long tail, above 2 a cliff.",
                            "type": "number"
                        }
                    },
                    "required": ["m_inf", "c0", "k"],
                    "additionalProperties": false
                },
                {
                    "description": "Points of capacity and miss ratio; straight lines join them.",
                    "type": "object",
                    "properties": {
                        "table": {
                            "description": "Capacities grow, and miss ratios, in [0, 1], do not.",
                            "type": "array",
                            "minItems": 2,
                            "maxItems": POINTS_MAX,
                            "items": {
                                "type": "array",
                                "prefixItems": [size, { "type": "number" }],
                                "minItems": 2,
                                "maxItems": 2
                            }
                        }
                    },
                    "required": ["table"],
                    "additionalProperties": false
                }
            ]
        })
    }
}

impl MissRatioCurve {
    /// Creates a curve of the family.
    pub fn family(m_inf: f64, c0: Bytes, k: f64) -> MissRatioCurve {
        MissRatioCurve {
            m_inf,
            c0,
            k,
            table: None,
        }
    }

    /// Creates a curve through points of capacity and miss ratio, in ascending order of capacity.
    pub fn through(points: impl IntoIterator<Item = (Bytes, f64)>) -> MissRatioCurve {
        MissRatioCurve::of_points(
            points
                .into_iter()
                .map(|(bytes, ratio)| Point(bytes, ratio))
                .collect(),
        )
    }

    fn of_points(table: Vec<Point>) -> MissRatioCurve {
        // Fits only a part of the points of a long table, because a fit looks at each point some thousand times.
        let every = table.len().div_ceil(FITTED_MAX).max(1);
        let as_numbers = |Point(bytes, ratio): &Point| (bytes.as_f64(), *ratio);
        let points: Vec<(f64, f64)> = table.iter().step_by(every).map(as_numbers).collect();
        let ends = points.first().zip(points.last());
        let middle = ends.map_or(0.5, |(first, last)| (first.1 + last.1) / 2.0);
        let half = points.iter().find(|point| point.1 <= middle);
        let nearest = FittedCurve::of(&points, half.map_or(1e6, |point| point.0));
        MissRatioCurve {
            table: Some(table),
            ..nearest.curve
        }
    }

    /// Returns the curve for a program with `factor` times the memory, rounded to whole bytes.
    #[must_use]
    pub fn stretched(&self, factor: f64) -> MissRatioCurve {
        let size = |size: Bytes| Bytes((size.as_f64() * factor).round() as u64);
        let point = |Point(bytes, ratio): &Point| Point(size(*bytes), *ratio);
        MissRatioCurve {
            c0: size(self.c0),
            table: self.table.as_ref().map(|table| table.iter().map(point).collect()),
            ..*self
        }
    }

    /// Returns the miss ratio at a capacity in bytes.
    pub fn at(&self, bytes: f64) -> f64 {
        if bytes <= 0.0 {
            return 1.0;
        }
        if let Some(table) = &self.table {
            return between(table, bytes);
        }
        let relative = bytes / self.c0.as_f64();
        let exponent = if self.k == 1.0 {
            relative
        } else {
            libm::pow(relative, self.k)
        };
        self.m_inf + (1.0 - self.m_inf) * libm::exp(-exponent)
    }

    /// Returns the miss ratio below which no cache can go.
    pub fn floor(&self) -> f64 {
        let last = self.table.as_ref().and_then(|table| table.last());
        last.map_or(self.m_inf, |Point(_, ratio)| *ratio)
    }

    pub(super) fn check(&self, key: &str) -> Result<(), Wrong> {
        let Some(table) = &self.table else {
            a_share(format!("{key}.m_inf"), self.m_inf)?;
            above_0(format!("{key}.c0"), self.c0.as_f64())?;
            return above_0(format!("{key}.k"), self.k);
        };
        if !(2..=POINTS_MAX).contains(&table.len()) {
            let expected = "a table must have 2 to 1024 points";
            return Err(Wrong::Figure(
                format!("{key}.table"),
                table.len() as f64,
                expected,
            ));
        }
        let mut before = Point(Bytes::ZERO, 1.0);
        for (at, point) in table.iter().enumerate() {
            let Point(bytes, ratio) = *point;
            if bytes <= before.0 {
                let expected = "capacities must be above 0 and grow from point to point";
                return Err(Wrong::Figure(
                    format!("{key}.table[{at}][0]"),
                    bytes.as_f64(),
                    expected,
                ));
            }
            a_share(format!("{key}.table[{at}][1]"), ratio)?;
            if ratio > before.1 {
                let expected =
                    "a larger cache does not miss more: it must not be above the ratio of the point before";
                return Err(Wrong::Figure(format!("{key}.table[{at}][1]"), ratio, expected));
            }
            before = *point;
        }
        Ok(())
    }
}

/// Returns the ratio at a capacity above 0.
fn between(table: &[Point], bytes: f64) -> f64 {
    let above = table.partition_point(|point| point.0.as_f64() < bytes);
    let Some(Point(above_bytes, above_ratio)) = table.get(above) else {
        return table.last().map_or(1.0, |point| point.1);
    };
    let Point(below_bytes, below_ratio) = match above {
        0 => Point(Bytes::ZERO, 1.0),
        _ => table[above - 1],
    };
    let way = (bytes - below_bytes.as_f64()) / (above_bytes.as_f64() - below_bytes.as_f64());
    below_ratio + (above_ratio - below_ratio) * way
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn three_points() -> MissRatioCurve {
        MissRatioCurve::through(
            [(1000, 0.8), (2000, 0.4), (4000, 0.3)].map(|(bytes, ratio)| (Bytes(bytes), ratio)),
        )
    }

    #[test]
    fn a_stretched_curve_misses_alike_with_as_much_more_capacity() {
        let family = MissRatioCurve::family(0.1, Bytes(3000), 1.5);
        for curve in [three_points(), family] {
            let twice = curve.stretched(2.0);
            for bytes in [700.0, 1500.0, 3900.0] {
                assert!((twice.at(2.0 * bytes) - curve.at(bytes)).abs() < 1e-12, "{bytes}");
            }
        }
    }

    #[test]
    fn straight_lines_join_the_points() {
        // By hand: straight lines from (0, 1) to (1000, 0.8), (2000, 0.4) and (4000, 0.3), then constant at 0.3.
        for (bytes, ratio) in [
            (0.0, 1.0),
            (500.0, 0.9),
            (1000.0, 0.8),
            (1500.0, 0.6),
            (3000.0, 0.35),
            (4000.0, 0.3),
            (1e12, 0.3),
        ] {
            assert!((three_points().at(bytes) - ratio).abs() < 1e-12, "{bytes}");
        }
        assert_eq!(three_points().floor(), 0.3);
    }

    #[test]
    fn both_ways_of_writing_come_back_as_they_were() {
        for curve in [three_points(), MissRatioCurve::family(0.1, Bytes(5000), 1.5)] {
            let text = serde_json::to_string(&curve).unwrap();
            assert_eq!(
                serde_json::from_str::<MissRatioCurve>(&text).unwrap(),
                curve,
                "{text}"
            );
        }
        let text = serde_json::to_string(&three_points()).unwrap();
        assert_eq!(text, r#"{"table":[["1000B",0.8],["2000B",0.4],["4000B",0.3]]}"#);
    }

    #[test]
    fn a_step_is_nearer_as_a_table_than_as_three_numbers() {
        // Two loops of 1 and 16 MiB, with half of the accesses each.
        let ratio = |mib: f64| match mib {
            ..1.0 => 1.0,
            ..16.0 => 0.5,
            _ => 0.0,
        };
        let points = (-10..=20).map(|at| libm::pow(2.0, f64::from(at) / 2.0));
        let table = MissRatioCurve::through(points.map(|mib| (Bytes((mib * 1048576.0) as u64), ratio(mib))));
        let nearest = MissRatioCurve::family(table.m_inf, table.c0, table.k);
        let error = |curve: &MissRatioCurve| {
            let away = [1.5, 4.0, 11.0].map(|mib| (curve.at(mib * 1048576.0) - 0.5).abs());
            away.into_iter().fold(0.0, f64::max)
        };
        assert!(error(&table) < 1e-9);
        assert!(error(&nearest) > 0.1, "{}", error(&nearest));
    }

    proptest! {
        #[test]
        fn a_table_that_is_allowed_never_rises(
            points in prop::collection::vec((1u64..1 << 40, 0.0..=1.0f64), 2..40),
            at in prop::collection::vec(0.0..1e13f64, 2),
        ) {
            let (mut bytes, mut ratios): (Vec<u64>, Vec<f64>) = points.into_iter().unzip();
            bytes.sort_unstable();
            bytes.dedup();
            ratios.sort_by(|a, b| b.total_cmp(a));
            prop_assume!(bytes.len() > 1);
            let curve = MissRatioCurve::through(bytes.into_iter().map(Bytes).zip(ratios));
            prop_assert!(curve.check("x").is_ok());
            let (low, high) = (at[0].min(at[1]), at[0].max(at[1]));
            prop_assert!(curve.at(low) >= curve.at(high) - 1e-12);
            prop_assert!((0.0..=1.0).contains(&curve.at(low)) && curve.at(1e14) == curve.floor());
        }
    }
}
