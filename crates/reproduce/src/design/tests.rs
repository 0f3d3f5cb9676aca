//! Tests of experiment files, and of their error messages.

use super::array::{Array, Axis, Cell};
use super::expression::Expression;
use super::functions::{Names, evaluate, r_squared, zigzags};
use super::*;
use crate::jobs::Progress;
use crate::work::execute;

const EXAMPLE: &str = include_str!("../../../../data/experiments/example.toml");

fn parse(text: &str) -> Result<Design, String> {
    let bases = |name: &str| base(name).with_context(|| format!("no base is named `{name}`"));
    Design::parse("mine.toml", text, &bases).map_err(|error| error.to_string())
}

#[test]
fn every_committed_file_reads() {
    let files = crate::experiments::all().count();
    assert!(files > 50, "{files}");
    assert_eq!(parse(EXAMPLE).unwrap().runs().len(), 3 * 2 * 2 * 3);
}

#[test]
fn what_is_wrong_is_said_with_its_line_and_what_to_write_instead() {
    let wrong = |from: &str, to: &str| {
        assert!(EXAMPLE.contains(from), "{from}");
        parse(&EXAMPLE.replacen(from, to, 1)).unwrap_err()
    };
    let line = |text: &str| 1 + EXAMPLE[..EXAMPLE.find(text).unwrap()].matches('\n').count();
    // The text to replace, its replacement, the line in the message, and the end of the message.
    for case in [
        "[axes] ~ [axis] ~ [axes] ~ unknown key `axis`; did you mean `axes`?",
        "vcpus = 4 ~ vcpu = 4 ~ vcpus = 4 ~ unknown key `vcpu`; did you mean `vcpus`?",
        "\"r910\" ~ \"r911\" ~  ~ r911",
        "over = [\"program\", \"policies\" ~ over = [\"programs\", \"policies\" ~ over = [ ~ did you mean `program`?",
        "max(longer) ~ max(longr) ~ most = ~ nothing is named `longr`; did you mean `longer`?",
        "max(longer) ~ max(longer ~ most = ~ `)` is expected before the end",
        "{longer} percent ~ {longer percent ~  ~ `{` has no `}`",
        "\"= 20 / solo_s(workload)\" ~ \"= 20 / solo_s(work)\" ~  ~ no axis or word is named `work`",
        "name = \"vm\"\n ~ name = \"vm\"\ncpus = \"zero\"\n ~  ~ zero",
    ] {
        let [from, to, key, said] = case.split(" ~ ").collect::<Vec<_>>()[..] else {
            panic!("{case}")
        };
        let error = wrong(from, to);
        assert!(error.contains(said), "{error}");
        if !key.is_empty() {
            assert!(error.starts_with(&format!("mine.toml:{}:", line(key))), "{error}");
        }
    }
}

#[test]
fn a_file_that_asks_for_too_much_is_told_so_at_once() {
    let with = |from: &str, to: &str| {
        assert!(EXAMPLE.contains(from), "{from}");
        parse(&EXAMPLE.replace(from, to)).unwrap_err()
    };
    let seeds = "seed = [1, 2, 3]";
    let (vm, most) = ("name = \"vm\"\n", "most = \"max(longer)\"");
    let deep = format!("most = \"{}1{}\"", "(".repeat(100), ")".repeat(100));
    let long = format!("most = \"0{}\"", " + 1".repeat(2000));
    let count = "`count` must be a whole number from 0 to 1000";
    let axis = "seed = { from = 0, to = 4294967295 }";
    for (from, to, said) in [
        (seeds, axis, "an axis may have at most 10000 labels"),
        (
            seeds,
            "seed = { from = 1, to = 9000 }",
            "make too many runs; at most 20000",
        ),
        (vm, "name = \"vm{n}\"\ncount = 1000000000000\n", count),
        (vm, "name = \"vm{n}\"\ncount = -1\n", count),
        (most, &deep, "nested deeper than 64"),
        (most, &long, "at most 1000 words and signs"),
        (
            "{longer} percent",
            "{longer:.999999} percent",
            "number of decimals, at most 17",
        ),
        (
            "[values]\n",
            "[grid.more]\nset = { is = [\"absent\"] }\n[values]\n",
            "`is` names `absent`",
        ),
    ] {
        let error = with(from, to);
        assert!(error.contains(said), "{said}: {error}");
    }
    let words = (0..12).map(|at| format!("w{at} = \"{}\"\n", format!("{{w{}}}", at + 1).repeat(8)));
    let words: String = words.collect();
    let error = with(
        "[run]\n",
        &format!(
            "[run]\nuntil = \"{{w0}}\"\nwords.w12 = \"1\"\n{}",
            words.replace('w', "words.w").replace("{words.", "{")
        ),
    );
    assert!(error.contains("words filled in"), "{error}");
    let event = "[[run.event]]\nat = \"0s\"\nvm = \"vm\"\nstays = \"0s\"\naway_at_most = \"1ns\"\nuntil = \"9s\"\naway = \"0\"\nhome = \"1\"\n";
    let error = parse(&format!("{EXAMPLE}\n{event}")).unwrap_err();
    assert!(error.contains("pinned more than 10000 times"), "{error}");
}

#[test]
fn an_experiment_without_a_claim_gives_results_tests_tables_and_figures() {
    let small = EXAMPLE
        .replace("[\"cg.B\", \"mg.B\", \"povray\"]", "[\"povray\"]")
        .replace("seed = [1, 2, 3]", "seed = [1, 2]")
        .replace("= 20 / solo_s(workload)", "= 1 / solo_s(workload)");
    let design = parse(&small).unwrap();
    let outcomes = execute(design.runs(), 2, None, &Progress::silent());
    let decision = design.decide(&outcomes).unwrap();
    assert_eq!(
        decision.measured.numbers.keys().collect::<Vec<_>>(),
        ["least", "most"]
    );
    assert_eq!(decision.measured.shapes.len(), 2);
    assert!(decision.measured.shapes[1].name.ends_with("beside lbm"));
    assert_eq!(decision.tables[0].rows.len(), 2);
    assert_eq!(decision.tables[0].header.len(), 6);
    assert_eq!(decision.tables[0].header[1], "default, s");
    assert_eq!(decision.tables[0].rows[0][0], "povray beside nothing");
    // povray waits for nothing, so it takes about a second under any policy.
    let seconds: f64 = decision.tables[0].rows[0][1].parse().unwrap();
    assert!((0.5..3.0).contains(&seconds), "{seconds}");
    let rows = design.rows(&outcomes).unwrap();
    // Half of the runs have one VM, the others have two.
    assert_eq!(rows.len(), 4 * 2 / 2 + 4 * 2 / 2 * 2);
    let cell = |name: &str| {
        rows[0]
            .iter()
            .find(|(own, _)| own == name)
            .map(|(_, value)| value.clone())
    };
    assert_eq!(cell("program"), Some("povray".into()));
    assert!(cell("instructions").unwrap().as_f64().unwrap() > 0.0);
}

#[test]
fn names_that_files_may_use_are_those_of_reports() {
    let design = parse(EXAMPLE).unwrap();
    let run = design.runs().remove(0);
    let outcome = execute(vec![run.clone()], 1, None, &Progress::silent());
    let counted = measures::of_run(&run, outcome.of(&run).unwrap(), None).unwrap();
    for (column, _) in counted.rows(&Vec::new()).remove(0) {
        assert!(design.knows(&column).is_ok(), "{column}");
    }
}

#[test]
fn the_published_tables_name_the_same_29_programs() {
    let design = parse("title = \"none\"\nbase = \"policies\"").unwrap();
    let labels = |table: &str| design.csv[table].values().next().unwrap().axes[0].labels.clone();
    assert_eq!(labels("table1"), labels("table4"));
    assert_eq!(design.axes["program"].labels.len(), 29);
    let classes = &design.csv["table1"]["imbalance_class"];
    let count = |class: &str| {
        classes
            .cells()
            .iter()
            .filter(|cell| **cell == Cell::Text(class.into()))
            .count()
    };
    assert_eq!((count("low"), count("moderate")), (11, 5));
}

#[test]
fn the_systems_of_the_policies_differ_in_what_the_paper_says() {
    let text = "title = \"systems\"\nbase = \"policies\"\n[axes]\nprogram = [\"facesim\", \"dc.B\"]\nsystem = [\"Xen\", \"Xen+\"]\n\
                policy = [\"round-1g\", \"first-touch\"]\n[grid.main]\nover = [\"program\", \"system\", \"policy\"]\nset = { is = [\"whole\"] }\n";
    let runs = parse(text).unwrap().runs();
    let vm = |at: usize| runs[at].scenario.vms[0].clone();
    for (first, passthrough, spins) in [(0, false, true), (4, true, false)] {
        let (mut xen, plus) = (vm(first), vm(first + 2));
        assert_eq!((plus.passthrough, plus.waiting.is_some()), (passthrough, spins));
        assert_ne!(xen, plus);
        (xen.passthrough, xen.waiting) = (plus.passthrough, plus.waiting);
        assert_eq!(xen, plus);
    }
    assert!(!vm(7).passthrough, "not under first-touch");
    assert_ne!(vm(6).release_calls, vm(7).release_calls);
}

/// Provides `a` and `b` along axis `x`; `a` is doubled along axis `y`.
struct Fixed;

impl Names for Fixed {
    fn named(&self, name: &str) -> Result<Array> {
        let x = Axis::new("x", ["one", "two", "three"]);
        let y = Axis::new("y", ["1", "2"]);
        let grid = |of: fn(f64, f64) -> f64| {
            Array::build(vec![x.clone(), y.clone()], |at| {
                Ok(Cell::Number(of(at[0] as f64, at[1] as f64)))
            })
        };
        match name {
            "a" => Ok(Array::of_numbers(vec![x], vec![3.0, 1.0, 2.0])),
            "b" => Ok(Array::of_numbers(
                vec![Axis::new("x", ["two", "three", "four"])],
                vec![10.0, 20.0, 30.0],
            )),
            "g" => grid(|x, y| 10.0 * x + y),
            "x" => Ok(Array::of_labels(&x)),
            _ => Err(anyhow!("no {name}")),
        }
    }

    fn machine(&self) -> &str {
        "r910"
    }
}

fn value(text: &str) -> Result<Array> {
    evaluate(&Expression::parse(text)?, &Fixed)
}

fn shown(text: &str) -> String {
    match value(text) {
        Ok(array) => array
            .cells()
            .iter()
            .map(Cell::shown)
            .collect::<Vec<_>>()
            .join(" "),
        Err(error) => format!("error: {error}"),
    }
}

#[test]
fn expressions_by_hand() {
    for (text, expected) in [
        ("1 + 2 * 3 - -4 / 2", "9"),
        ("(1 + 2) * 3 > 8 and not 1 > 2", "1"),
        ("a * 10", "30 10 20"),
        // Only common labels are kept.
        ("a + b", "11 22"),
        ("a[x='two']", "1"),
        ("a[x!='two']", "3 2"),
        ("a[x=['three', 'one']]", "2 3"),
        ("a[x=least(a, x)]", "1"),
        ("g[x=greatest(g, x)]", "20 21"),
        ("max(g, x)", "20 21"),
        ("max(g)", "21"),
        ("max(a, 2)", "3 2 2"),
        ("sum(g, y)", "1 21 41"),
        ("count(a > 1)", "2"),
        ("ranked(a, x)", "one three two"),
        ("place(a, x)", "1 3 2"),
        ("above(a, 2)", "50 -50 0"),
        ("below(1, 4)", "75"),
        ("if(a > 1, a, 0 - a)", "3 -1 2"),
        ("else(if(a > 1, a, 0 / 0), 7)", "3 NaN 2"),
        ("x == 'two'", "0 1 0"),
        ("among(x, 'one', 'two')", "1 1 0"),
        ("tau(a, a * a, x)", "1"),
        ("power(a, 2)", "9 1 4"),
        ("regret(a, a, x)", "0"),
        // Choosing the lower of the two costs 1, 1 and 2 more.
        ("regret(0 - a, a, x)", "1.33"),
        ("mean(rsd(g, x), y)", "95.5"),
    ] {
        assert_eq!(shown(text), expected, "{text}");
    }
}

#[test]
fn what_cannot_be_computed_says_why() {
    for (text, said) in [
        ("a[x='four']", "`x` has no label `four`"),
        ("a[z='four']", "has no axis `z`"),
        ("meen(a)", "there is no function `meen`; did you mean `mean`?"),
        ("mean(a, y)", "takes a value and axes of that value"),
        ("x + 1", "`one` is a word, not a number"),
        ("a +", "the expression ends too early"),
        ("'open", "has no closing quote"),
        ("a ? 1", "`?` has no meaning"),
    ] {
        assert!(shown(text).contains(said), "{text}: {}", shown(text));
    }
}

#[test]
fn a_straight_line_fits_wholly_and_a_step_does_not() {
    let xs: Vec<f64> = (0..6).map(f64::from).collect();
    let line: Vec<f64> = xs.iter().map(|x| 3.0 + 2.0 * x).collect();
    assert!((r_squared(&line, &xs).unwrap() - 1.0).abs() < 1e-12);
    // Deviations from the mean: x -1.5, -.5, .5, 1.5; y -.25 three times, then .75. So the result is 1.5² / (5 · 0.75).
    let step = r_squared(&[0.0, 0.0, 0.0, 1.0], &xs[..4]).unwrap();
    assert!((step - 0.6).abs() < 1e-12);
}

#[test]
fn a_zigzag_goes_below_and_comes_back() {
    assert_eq!(zigzags(&[5.0, -1.0, -2.0, 3.0, -1.0, 4.0, -1.0], 0.0, 0.0), 2);
    // Between the bounds nothing changes.
    assert_eq!(zigzags(&[100.0, 50.0, 100.0, 0.0, 50.0, 100.0], 10.0, 90.0), 1);
    assert_eq!(zigzags(&[], 0.0, 0.0), 0);
}

#[test]
fn the_same_file_gives_the_same_runs_whatever_the_order_of_its_tables() {
    let (first, rest) = EXAMPLE.split_once("[axes]").unwrap();
    let (axes, rest) = rest.split_once("# What a label sets").unwrap();
    let moved = format!("{first}# What a label sets{rest}\n[axes]{axes}");
    assert_eq!(parse(EXAMPLE).unwrap().runs(), parse(&moved).unwrap().runs());
}

#[test]
fn a_value_of_the_file_can_be_multiplied_and_one_that_it_has_not_cannot() {
    use crate::vary::End;
    let text = "title = \"one\"\n[values]\na = \"2\"\nb = \"a * 3 + 1\"\n[results]\nr = \"b\"\n";
    let design = parse(text).unwrap();
    let of = |outcomes: &Outcomes| design.decide(outcomes).unwrap().measured.numbers["r"];
    let as_said = Outcomes::default();
    let halved = as_said.at(&End::parse("values.a", 0.5).unwrap());
    assert_eq!((of(&as_said), of(&halved)), (7.0, 4.0));
    assert!(design.has_value("a").is_ok());
    assert!(
        design
            .has_value("bb")
            .unwrap_err()
            .to_string()
            .contains("did you mean `b`?")
    );
    assert!(
        End::parse("values.a", 0.0)
            .unwrap_err()
            .to_string()
            .contains("above 0")
    );
    assert_eq!(End::parse("values.a", 2.0).unwrap().to_string(), "values.a x 2");
}

#[test]
fn a_figures_name_is_a_file_of_the_directory_that_no_other_figure_has() {
    let named = |name: &str| parse(&EXAMPLE.replacen("name = \"example\"", &format!("name = {name}"), 1));
    let long = "a".repeat(300);
    for name in "../x .hidden /abs a/b . .. a\\u0000b a\\nb"
        .split(' ')
        .chain(["", &long])
    {
        let said = named(&format!("\"{name}\"")).unwrap_err();
        assert!(
            said.contains("figure[0].name") || said.contains("`figure.name`"),
            "{name}: {said}"
        );
        assert!(said.contains("rename it"), "{name}: {said}");
    }
    assert!(named("\"1a what it costs\"").is_ok());
    let figure = &EXAMPLE[EXAMPLE.find("[[figure]]").unwrap()..];
    let said = parse(&format!("{EXAMPLE}\n{figure}")).unwrap_err();
    assert!(said.contains("two figures have the name `example`"), "{said}");
    let unnamed = parse(&EXAMPLE.replacen("name = \"example\"\n", "", 1)).unwrap_err();
    assert!(unnamed.contains("is empty"), "{unnamed}");
}

#[test]
fn figures_of_all_claims_have_files_of_their_own() {
    let mut taken = std::collections::BTreeSet::new();
    for (name, text) in crate::experiments::FILES {
        let design = Design::embedded(name, text).unwrap();
        for figure in &design.file.figures {
            assert!(taken.insert(figure.name.clone()), "{}", figure.name);
        }
    }
    let scoreboard = crate::scoreboard::figures(&[]);
    assert!(!taken.is_empty() && scoreboard.iter().all(|figure| taken.insert(figure.name.clone())));
}

#[test]
fn a_base_is_a_name_and_no_path() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("a/b");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(dir.path().join("mine.toml"), EXAMPLE).unwrap();
    std::fs::write(dir.path().join("a/beside.toml"), EXAMPLE).unwrap();
    let absolute = dir.path().join("mine").display().to_string();
    for base in ["../../mine", "../mine", &absolute] {
        let text = format!("base = \"{base}\"\n{EXAMPLE}");
        let said = Design::beside(&folder.join("x.toml"), &text)
            .unwrap_err()
            .to_string();
        assert!(said.contains("has a `/`"), "{base}: {said}");
    }
    let text = format!("base = \"beside\"\n{EXAMPLE}");
    assert!(Design::beside(&folder.join("x.toml"), &text).is_ok());
}
