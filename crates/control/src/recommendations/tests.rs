use std::collections::BTreeSet;

use homenode_host::{CpuQuota, Limit, VmSample};
use homenode_units::{CpuSet, Pages, Permit};

use super::*;

const CONFIG: fn() -> Config = Config::default;

fn nodes(list: &str) -> NodeSet {
    list.parse().unwrap()
}

/// Returns a sample at this second, with VMs 1 and 2, which have permits.
fn at(second: u64) -> Sample {
    let vm = |id: u128| {
        let mut vm = VmSample::new(VmId(id), format!("vm{id}"));
        vm.settings.permit = Some(Permit::pollution(10_000).unwrap());
        vm
    };
    Sample {
        at: Ns::from_secs(second),
        vms: vec![vm(1), vm(2)],
        ..Sample::default()
    }
}

fn decision(policy: &'static str, vm: u128, act: Act) -> Decision {
    Decision {
        policy,
        action: act.on(VmId(vm)),
        reason: "because".into(),
    }
}

fn home(vm: u128, list: &str) -> Vec<Decision> {
    let cpus: CpuSet = "0-3".parse().unwrap();
    vec![
        decision("arrange", vm, Act::SetHome { nodes: nodes(list) }),
        decision("arrange", vm, Act::PinVcpus { vcpus: vec![0], cpus }),
    ]
}

fn quota(share: f64) -> Decision {
    let limit = Limit::CpuQuota(CpuQuota::of(share, Ns::from_millis(30)));
    let lease_ns = Ns::from_secs(10);
    decision("permits", 1, Act::Limit { limit, lease_ns })
}

fn pages(vm: u128, to: &str) -> Decision {
    let (from, to, pages_max) = (nodes("3"), nodes(to), Pages(1));
    decision("repatriate", vm, Act::MovePages { from, to, pages_max })
}

impl Recommendations {
    fn takes(&mut self, second: u64, waiting: Vec<Decision>, gain: Option<f64>) {
        self.takes_by(&CONFIG(), second, waiting, gain);
    }

    fn takes_by(&mut self, config: &Config, second: u64, waiting: Vec<Decision>, gain: Option<f64>) {
        let sample = at(second);
        self.expire(config, &sample);
        self.take(config, &sample, waiting, |homes| {
            homes.iter().filter_map(|(vm, _)| Some((*vm, gain?))).collect()
        });
    }

    /// Takes these decisions in. `gain` predicts the gain of each VM from homes that are assigned together.
    fn takes_gaining(
        &mut self,
        second: u64,
        waiting: Vec<Decision>,
        gain: impl Fn(&[(VmId, NodeSet)]) -> f64,
    ) {
        let sample = at(second);
        self.expire(&CONFIG(), &sample);
        self.take(&CONFIG(), &sample, waiting, |homes| {
            homes.iter().map(|(vm, _)| (*vm, gain(homes))).collect()
        });
    }

    fn states(&self) -> Vec<(u64, State)> {
        self.all().iter().map(|one| (one.id, one.state)).collect()
    }
}

#[test]
fn what_is_wanted_again_is_one_recommendation_and_told_once() {
    let mut all = Recommendations::default();
    for second in 0..200 {
        let mut waiting = home(1, "0");
        waiting.push(quota(0.1 + second as f64 / 1000.0));
        all.takes(second, waiting, Some(0.2));
    }
    assert_eq!(all.states(), [(1, State::Open), (2, State::Open)]);
    assert_eq!(all.take_events().len(), 2);
    let shown = all.all();
    assert_eq!(shown[0].text, "give VM vm1 a home on node 0");
    assert_eq!((shown[0].gain, shown[1].gain), (Some(0.2), None));
    // The recommendation shows the decision that would be carried out now.
    assert_eq!(shown[1].decision, quota(0.299));
    assert_eq!(shown[1].expires_at, Ns::from_secs(199 + 300));
}

#[test]
fn a_home_on_other_nodes_is_another_recommendation() {
    let mut all = Recommendations::default();
    all.takes(0, home(1, "0"), None);
    all.takes(1, home(1, "1"), None);
    assert_eq!(all.states(), [(1, State::Expired), (2, State::Open)]);
    all.approve(2, &CONFIG(), Ns::from_secs(2)).unwrap();
    // What was approved is what is done, even if the policy wants something else meanwhile.
    all.takes(3, home(1, "2"), None);
    assert_eq!(all.states().last(), Some(&(2, State::Approved)));
    assert!(all.lets_through(&home(1, "1")[0]) && !all.lets_through(&home(1, "2")[0]));
}

#[test]
fn a_new_arrangement_takes_the_place_of_the_one_before() {
    let mut all = Recommendations::default();
    let together = |all: &Recommendations| -> Vec<(u64, Vec<u64>)> {
        let open = all.all().into_iter().filter(|one| one.state == State::Open);
        open.map(|one| (one.id, one.together.clone())).collect()
    };
    all.takes(0, [home(1, "0"), home(2, "1")].concat(), Some(0.1));
    assert_eq!(together(&all), [(1, vec![2]), (2, vec![1])]);
    all.takes(1, vec![quota(0.5)], None);
    let better_on_2 = |homes: &[(VmId, NodeSet)]| match homes.iter().any(|(_, on)| *on == nodes("2")) {
        true => 0.3,
        false => 0.1,
    };
    all.takes_gaining(120, [home(1, "0"), home(2, "2")].concat(), better_on_2);
    assert_eq!(together(&all), [(1, vec![4]), (3, vec![]), (4, vec![1])]);
    assert!(
        all.all()
            .iter()
            .all(|one| one.id == 2 || one.id == 3 || one.gain == Some(0.3))
    );
    let better_alone = |homes: &[(VmId, NodeSet)]| if homes.len() == 1 { 2.0 } else { 0.3 };
    all.takes_gaining(240, home(2, "2"), better_alone);
    assert_eq!(together(&all), [(3, vec![]), (4, vec![])]);
}

#[test]
fn an_arrangement_stays_open_until_another_is_predicted_to_gain_much_more() {
    let better_by = |more: f64| {
        move |homes: &[(VmId, NodeSet)]| match homes.iter().any(|(_, on)| *on == nodes("2")) {
            true => 0.2 + more,
            false => 0.2,
        }
    };
    let mut all = Recommendations::default();
    all.takes_gaining(0, [home(1, "0"), home(2, "1")].concat(), better_by(0.0));
    for look in 1..40 {
        let other = if look % 2 == 0 { "3" } else { "2" };
        all.takes_gaining(5 * look, [home(1, "0"), home(2, other)].concat(), better_by(0.09));
    }
    assert_eq!(all.states(), [(1, State::Open), (2, State::Open)]);
    assert_eq!(all.take_events().len(), 2);
    let kept = all.all()[1].clone();
    assert_eq!(
        (kept.text.as_str(), kept.gain),
        ("give VM vm2 a home on node 1", Some(0.2))
    );
    assert_eq!(
        (kept.together, kept.expires_at),
        (vec![1], Ns::from_secs(195 + 300))
    );
    all.takes_gaining(200, [home(1, "0"), home(2, "2")].concat(), better_by(0.11));
    let states = [(1, State::Open), (2, State::Expired), (3, State::Open)];
    assert_eq!(all.states(), states);
    // A VM without a home in the open arrangement does not wait for the end of that arrangement.
    let mut all = Recommendations::default();
    all.takes_gaining(0, home(1, "0"), |_| 0.2);
    all.takes_gaining(5, [home(1, "1"), home(2, "2")].concat(), |_| 0.2);
    let states = [(1, State::Expired), (2, State::Open), (3, State::Open)];
    assert_eq!(all.states(), states);
    // An arrangement that is predicted to cost speed by now does not stay.
    let mut all = Recommendations::default();
    all.takes_gaining(0, home(1, "0"), |_| 0.2);
    let on_0 = |homes: &[(VmId, NodeSet)]| homes.iter().any(|(_, on)| *on == nodes("0"));
    all.takes_gaining(5, home(1, "1"), |homes| if on_0(homes) { -0.1 } else { -0.05 });
    assert_eq!(all.states(), [(1, State::Expired), (2, State::Open)]);
}

#[test]
fn what_has_lost_its_cause_ends_at_once() {
    let placed = |vm: u128| decision("placement", vm, Act::SetHome { nodes: nodes("0") });
    let mut all = Recommendations::default();
    all.takes(0, vec![quota(0.5), placed(2)], None);
    // `placement` wants a home in each cycle, while `permits` decides now and then.
    all.takes(1, vec![], None);
    assert_eq!(all.states(), [(1, State::Expired), (2, State::Open)]);
    let mut changed = at(2);
    changed.vms[0].settings.permit = None;
    all.expire(&CONFIG(), &changed);
    assert_eq!(all.states().last(), Some(&(2, State::Expired)));
    // An approval to hold a VM ends with the permit, too.
    all.takes(3, vec![quota(0.5)], None);
    all.approve(3, &CONFIG(), Ns::from_secs(3)).unwrap();
    all.expire(&CONFIG(), &changed);
    assert_eq!(all.states().last(), Some(&(3, State::Expired)));
    all.takes(4, home(2, "1"), None);
    let mut observed = at(5);
    observed.vms[1].settings.mode = Some(Mode::Observe);
    all.expire(&CONFIG(), &observed);
    assert_eq!(all.states().last(), Some(&(4, State::Expired)));
    // A home for the time of a drain ends with the drain, even if it was just approved.
    all.takes(6, vec![placed(1)], None);
    all.approve(5, &CONFIG(), Ns::from_secs(6)).unwrap();
    all.end_of_drain(&BTreeSet::from([VmId(2)]), Ns::from_secs(7));
    assert_eq!(all.states().last(), Some(&(5, State::Approved)));
    all.end_of_drain(&BTreeSet::from([VmId(1)]), Ns::from_secs(7));
    assert_eq!(all.states().last(), Some(&(5, State::Expired)));
}

#[test]
fn what_was_replaced_names_its_successor() {
    let mut all = Recommendations::default();
    let approved = |all: &mut Recommendations, second: u64| {
        let refused = all.approve(1, &CONFIG(), Ns::from_secs(second));
        refused.unwrap_err().to_string()
    };
    all.takes(0, home(1, "0"), None);
    all.takes(1, [home(1, "3"), home(2, "1")].concat(), None);
    assert_eq!(
        approved(&mut all, 2),
        "recommendation 1 was replaced by 2 (give VM vm1 a home on node 3); open are: 2, 3"
    );
    all.reject(2, &CONFIG(), Ns::from_secs(2)).unwrap();
    assert_eq!(
        approved(&mut all, 3),
        "recommendation 1 is already expired; open are: 3"
    );
}

#[test]
fn what_is_rejected_stays_away_unless_much_more_is_predicted() {
    let mut all = Recommendations::default();
    all.takes(0, home(1, "0"), Some(0.1));
    all.reject(1, &CONFIG(), Ns::from_secs(1)).unwrap();
    all.takes(2, home(1, "1"), Some(0.15));
    all.takes(3, home(1, "1"), None);
    assert_eq!(all.states(), [(1, State::Rejected)]);
    all.takes(4, home(1, "1"), Some(0.2));
    assert_eq!(all.states().last(), Some(&(2, State::Open)));
    all.reject(2, &CONFIG(), Ns::from_secs(5)).unwrap();
    all.takes(5 + 86_399, home(1, "0"), Some(0.1));
    assert_eq!(all.states().len(), 2);
    all.takes(5 + 86_400, home(1, "0"), Some(0.1));
    assert_eq!(all.states().last(), Some(&(3, State::Open)));
}

#[test]
fn what_nobody_wants_any_more_expires() {
    let mut all = Recommendations::default();
    all.takes(0, home(1, "0"), None);
    all.takes(10, vec![], None);
    all.takes(299, vec![], None);
    assert_eq!(all.states(), [(1, State::Open)]);
    all.takes(300, vec![], None);
    assert_eq!(all.states(), [(1, State::Expired)]);
    // A recommendation that is always wanted expires after an hour, too: an approval must be based on the current state.
    for second in 400..400 + 3600 {
        all.takes(second, vec![quota(0.5)], None);
    }
    assert_eq!(all.states().last(), Some(&(2, State::Open)));
    all.takes(4000, vec![quota(0.5)], None);
    assert_eq!(all.states()[1..], [(2, State::Expired), (3, State::Open)]);
    // A VM that is gone has no recommendations.
    let gone = Sample {
        at: Ns::from_secs(4001),
        ..Sample::default()
    };
    all.expire(&CONFIG(), &gone);
    assert_eq!(all.states().last(), Some(&(3, State::Expired)));
    let unknown = all.approve(3, &CONFIG(), Ns::from_secs(4002)).unwrap_err();
    assert!(matches!(unknown, NotThat::Over { .. }), "{unknown}");
    assert_eq!(
        all.approve(9, &CONFIG(), Ns::ZERO).unwrap_err().to_string(),
        "there is no recommendation 9; none is open"
    );
}

#[test]
fn what_is_approved_goes_through_until_it_is_no_longer_wanted_or_too_old() {
    let (mut all, config) = (Recommendations::default(), CONFIG());
    let stands = |all: &Recommendations| all.lets_stand(VmId(1), "permits", Lever::CpuQuota);
    all.takes(0, vec![quota(0.5)], None);
    assert!(!all.lets_through(&quota(0.5)) && !stands(&all));
    all.approve(1, &config, Ns::from_secs(1)).unwrap();
    for second in 2..100 {
        assert!(all.lets_through(&quota(0.4)) && stands(&all));
        all.outcome(&quota(0.4), &Outcome::Renewed, &config, Ns::from_secs(second));
        all.takes(second, vec![], None);
    }
    assert_eq!(all.states(), [(1, State::Applied)]);
    all.takes(99 + 59, vec![], None);
    assert!(stands(&all));
    all.takes(99 + 60, vec![], None);
    assert!(!stands(&all) && !all.lets_through(&quota(0.4)));
    // Recommended and approved again, and then wanted for as long as possible.
    all.takes(200, vec![quota(0.5)], None);
    all.approve(2, &config, Ns::from_secs(200)).unwrap();
    for second in 201..201 + 3600 {
        assert!(stands(&all), "{second}");
        all.outcome(&quota(0.4), &Outcome::Renewed, &config, Ns::from_secs(second));
        all.takes(second, vec![], None);
    }
    all.takes(201 + 3600, vec![], None);
    assert!(!stands(&all));
    assert_eq!(all.states(), [(1, State::Applied), (2, State::Applied)]);
}

#[test]
fn what_is_much_more_and_how_long_a_yes_lasts_are_the_operators_to_say() {
    let config = Config {
        much_more: 0.01,
        pause_max: Ns::from_secs(10),
        ..CONFIG()
    };
    let mut all = Recommendations::default();
    all.takes_by(&config, 0, home(1, "0"), Some(0.1));
    all.reject(1, &config, Ns::from_secs(1)).unwrap();
    all.takes_by(&config, 2, home(1, "1"), Some(0.12));
    assert_eq!(all.states(), [(1, State::Rejected), (2, State::Open)]);
    let mut all = Recommendations::default();
    all.takes_by(&config, 0, vec![quota(0.5)], None);
    all.approve(1, &config, Ns::from_secs(1)).unwrap();
    all.outcome(&quota(0.5), &Outcome::Done, &config, Ns::from_secs(1));
    assert!(all.lets_through(&quota(0.5)));
    // The policy has not wanted it since that time.
    all.takes_by(&config, 11, vec![], None);
    assert!(!all.lets_through(&quota(0.5)));
}

#[test]
fn pages_follow_an_approved_home_and_go_nowhere_else() {
    let mut all = Recommendations::default();
    all.takes(0, home(1, "0-1"), None);
    assert!(!all.lets_through(&pages(1, "0")));
    all.approve(1, &CONFIG(), Ns::from_secs(1)).unwrap();
    assert!(all.lets_through(&pages(1, "0")) && all.lets_through(&pages(1, "0-1")));
    assert!(!all.lets_through(&pages(1, "2")) && !all.lets_through(&pages(2, "0")));
    assert!(!all.lets_through(&quota(0.5)));
    // A home that could not be assigned is over, and lets no following decisions through.
    let failed = Outcome::Failed(homenode_host::Failure::VmGone.on("vm1"));
    all.outcome(&home(1, "0-1")[0], &failed, &CONFIG(), Ns::from_secs(2));
    assert!(!all.lets_through(&pages(1, "0")));
    assert_eq!(all.states(), [(1, State::Expired)]);
}

#[test]
fn what_is_kept_is_bounded() {
    let mut all = Recommendations::default();
    for second in 0..2000 {
        let list = if second % 2 == 0 { "0" } else { "1" };
        all.takes(second, home(1, list), None);
    }
    assert_eq!(all.all().len(), PAST_MAX + 1);
    let many = |id: u128| VmSample::new(VmId(id), "many");
    let crowd = Sample {
        at: Ns::from_secs(2000),
        vms: (1..6000).map(many).collect(),
        ..Sample::default()
    };
    let waiting = (1..6000).map(|vm| home(vm, "0").remove(0)).collect();
    let mut all = Recommendations::default();
    all.take(&CONFIG(), &crowd, waiting, |_| BTreeMap::new());
    assert_eq!(all.all().len(), LIVE_MAX);
    for id in 1..=LIVE_MAX as u64 {
        all.reject(id, &CONFIG(), Ns::from_secs(2001)).unwrap();
    }
    assert_eq!((all.all().len(), all.rejected.len()), (PAST_MAX, REJECTED_MAX));
}
