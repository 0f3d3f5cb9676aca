use super::*;
use homenode_units::CpuId;
use proptest::prelude::*;

const KHZ: u64 = 1_000_000;
const STEP: Ns = Ns::from_millis(100);

/// VMs of a host with two caches, which run at 1 GHz and one instruction per cycle. All have permits and belong on CPU 0.
/// Each has its misses per millisecond, first alone, then next to others.
struct Host {
    vms: Vec<(Seen, f64, f64)>,
    now: Ns,
}

fn cache(n: u32) -> CpuSet {
    CpuSet::one(CpuId(n))
}

impl Host {
    fn new(rates: &[(f64, f64)]) -> Host {
        let vm = |(at, (alone, beside)): (usize, &(f64, f64))| {
            let seen = Seen {
                vm: VmId(at as u128),
                counts: Some(Counts::default()),
                has_permit: true,
                caches: cache(0),
            };
            (seen, *alone, *beside)
        };
        Host {
            vms: rates.iter().enumerate().map(vm).collect(),
            now: Ns::ZERO,
        }
    }

    fn here(&self) -> usize {
        let here = self.vms.iter().filter(|(seen, ..)| seen.caches == cache(0));
        here.count()
    }

    /// Runs a step of 100 ms; VMs that must be out then are out at once.
    fn step(&mut self, sampler: &mut Sampler) {
        self.now += STEP;
        let here = self.here();
        for (seen, alone, beside) in &mut self.vms {
            let counts = seen.counts.as_mut().unwrap();
            counts.instructions += 100_000_000;
            counts.cycles += 100_000_000;
            let is_beside = here > 1 && seen.caches == cache(0);
            counts.llc_misses += (if is_beside { *beside } else { *alone } * 100.0) as u64;
        }
        self.look(sampler);
    }

    /// Lets the sampler look at the host as it is.
    fn look(&mut self, sampler: &mut Sampler) {
        let seen: Vec<Seen> = self.vms.iter().map(|(seen, ..)| seen.clone()).collect();
        sampler.step(self.now, &seen, |_, _, _| None);
        for (seen, ..) in &mut self.vms {
            seen.caches = cache(u32::from(sampler.is_out(seen.vm)));
        }
    }

    fn run(&mut self, sampler: &mut Sampler, steps: usize) -> usize {
        let mut most = 0;
        for _ in 0..steps {
            self.step(sampler);
            most = most.max(sampler.out().count());
        }
        most
    }
}

fn sampler() -> Sampler {
    let mut sampler = Sampler::default();
    sampler.set(Config::default(), KHZ);
    sampler
}

#[test]
fn isolation_gives_a_vms_own_pollution() {
    // VM 0 misses 2000 per ms alone, and 10000 next to VM 1, which misses 50000.
    let (mut host, mut sampler) = (Host::new(&[(2_000.0, 10_000.0), (50_000.0, 50_000.0)]), sampler());
    host.run(&mut sampler, 2);
    let awaited = sampler.charge(VmId(0)).unwrap();
    assert_eq!((awaited.part, awaited.basis), (None, Basis::Awaited));
    host.run(&mut sampler, 60);
    while host.here() < 2 || sampler.isolates().is_some() {
        host.step(&mut sampler);
    }
    let own = sampler.known[&VmId(0)].own.unwrap();
    assert!((own.per_ms - 2_000.0).abs() < 1.0, "{own:?}");
    assert!((own.share - 0.2).abs() < 0.01, "{own:?}");
    assert!(sampler.known[&VmId(1)].own.unwrap().share > 0.99);
}

#[test]
fn a_vm_with_few_misses_is_not_isolated() {
    let (mut host, mut sampler) = (Host::new(&[(900.0, 990.0), (900.0, 50_000.0)]), sampler());
    host.vms[1].0.has_permit = false;
    assert_eq!(host.run(&mut sampler, 20), 0);
    let charge = sampler.charge(VmId(0)).unwrap();
    assert_eq!((charge.basis, charge.part), (Basis::FewMisses, Some(1.0)));
    assert_eq!(sampler.charge(VmId(1)), None, "it has no permit");
}

#[test]
fn a_vm_among_quiet_neighbours_is_not_isolated() {
    let rates = [(40_000.0, 40_400.0), (10.0, 900.0), (10.0, 900.0)];
    let quiet = Charge {
        part: Some(1.0),
        basis: Basis::QuietNeighbours,
    };
    let (mut host, mut sampler) = (Host::new(&rates), sampler());
    assert_eq!(host.run(&mut sampler, 20), 0);
    assert_eq!(sampler.charge(VmId(0)), Some(quiet));
    // A VM that has the cache to itself anyway is not isolated either.
    let (mut host, mut sampler) = (
        Host::new(&[(40_000.0, 0.0), (50_000.0, 50_000.0)]),
        self::sampler(),
    );
    host.vms[1].0.caches = cache(1);
    host.step(&mut sampler);
    host.vms[1].0.caches = cache(1);
    host.step(&mut sampler);
    assert_eq!(sampler.charge(VmId(0)), Some(quiet));
}

#[test]
fn who_comes_during_a_window_leaves_too() {
    let (mut host, mut sampler) = (Host::new(&[(2_000.0, 9_000.0), (50_000.0, 50_000.0)]), sampler());
    let newcomer = Host::new(&[(0.0, 0.0), (0.0, 0.0), (7_000.0, 7_000.0)])
        .vms
        .remove(2);
    while sampler.isolates().is_none() {
        host.step(&mut sampler);
    }
    host.vms.push(newcomer);
    host.step(&mut sampler);
    assert_eq!(sampler.isolates().map(|(vm, _)| vm), Some(VmId(0)));
    assert!(sampler.is_out(VmId(2)));
}

#[test]
fn a_window_that_never_fills_is_given_up() {
    let (mut host, mut sampler) = (Host::new(&[(2_000.0, 9_000.0), (50_000.0, 50_000.0)]), sampler());
    while sampler.isolates().is_none() {
        host.step(&mut sampler);
    }
    // From now on no VM runs. After five seconds all are back.
    for _ in 0..52 {
        host.now += STEP;
        host.look(&mut sampler);
    }
    assert_eq!(sampler.out().count(), 0);
    assert_eq!(sampler.known[&VmId(0)].obstacle, Some(Obstacle::GaveUp));
    // Each further window comes after twice the pause, up to an hour.
    let mut pauses = vec![];
    for _ in 0..6 {
        let seen = host.vms[0].0.clone();
        sampler.settle(host.now, &seen, Err(Obstacle::GaveUp));
        pauses.push((sampler.known[&VmId(0)].not_before - host.now).as_secs_f64());
    }
    assert_eq!(pauses, [500.0, 1000.0, 2000.0, 3600.0, 3600.0, 3600.0]);
    sampler.settle(host.now, &host.vms[0].0.clone(), Ok(1.0));
    assert_eq!(sampler.known[&VmId(0)].gave_up_count, 0);
}

#[test]
fn phases_between_windows_count() {
    let (mut host, mut sampler) = (Host::new(&[(2_000.0, 10_000.0), (50_000.0, 50_000.0)]), sampler());
    host.vms[1].0.has_permit = false;
    host.run(&mut sampler, 40);
    while host.here() < 2 || sampler.isolates().is_some() {
        host.step(&mut sampler);
    }
    // There is no further window, but the VM has three times as many misses of its own: the charge triples.
    let mut charge_at = |rate: f64| {
        host.vms[0].2 = rate;
        host.now += STEP;
        // The disturber runs as before.
        for (at, misses) in [(0, (rate * 100.0) as u64), (1, 5_000_000)] {
            let counts = host.vms[at].0.counts.as_mut().unwrap();
            counts.cycles += 100_000_000;
            counts.llc_misses += misses;
        }
        let seen: Vec<Seen> = host.vms.iter().map(|(seen, ..)| seen.clone()).collect();
        sampler.step(host.now, &seen, |_, _, _| Some(Obstacle::Resting));
        sampler.charge(VmId(0)).unwrap().part.unwrap() * rate
    };
    assert!((charge_at(30_000.0) - 6_000.0).abs() < 150.0);
    // A milder neighbour: what the VM misses by itself is charged at least.
    assert!((charge_at(2_500.0) - 2_000.0).abs() < 10.0);
    assert!((charge_at(1_500.0) - 1_500.0).abs() < 10.0);
}

proptest! {
    /// VMs come and go at random. In the end, no VM must be elsewhere.
    #[test]
    fn nobody_is_out_in_the_end_whatever_happens(gone in prop::collection::vec((0usize..200, 0u128..4), 0..6)) {
        let rates = [(2_000.0, 9_000.0), (50_000.0, 50_000.0), (3_000.0, 8_000.0), (100.0, 5_000.0)];
        let (mut host, mut sampler) = (Host::new(&rates), sampler());
        for step in 0..200 {
            host.step(&mut sampler);
            host.vms.retain(|(seen, ..)| !gone.contains(&(step, seen.vm.0)));
            // The VM with the cache is never out itself.
            prop_assert!(sampler.isolates().is_none_or(|(vm, _)| !sampler.is_out(vm)));
        }
        // All VMs stop, so an open window is abandoned.
        for _ in 0..60 {
            host.now += STEP;
            host.look(&mut sampler);
        }
        prop_assert_eq!(sampler.out().count(), 0);
    }
}
