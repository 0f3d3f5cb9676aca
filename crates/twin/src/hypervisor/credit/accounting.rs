//! Credits: what running costs, and what each accounting hands out.

use homenode_units::Ns;

use super::{CREDITS_PER_MS, CREDITS_PER_SLICE, Credit, Priority};
use crate::hypervisor::queues::Queues;
use crate::index::TaskIx;

impl Credit {
    /// Hands out credits, then parks and unparks vCPUs.
    pub(super) fn account(&mut self, queues: &mut Queues, now: Ns) {
        self.accountings += 1;
        self.hand_out_all(queues.cpus());
        for at in 0..self.to_park.len() {
            self.park(queues, self.to_park[at], now);
        }
        for at in 0..self.to_unpark.len() {
            self.unpark(queues, self.to_unpark[at], now);
        }
        self.to_park.clear();
        self.to_unpark.clear();
    }

    /// Hands out the credits of `cpus` CPUs to the active domains.
    pub(super) fn hand_out_all(&mut self, cpus: usize) {
        // A negative balance then converges towards 0.
        let owed = (-self.balance).max(0);
        let mut total = CREDITS_PER_SLICE * cpus.cast_signed() as i64 + owed;
        let (weight_total, mut weight_left) = (self.weight, self.weight);
        let mut others_took_less = false;
        self.balance = 0;
        self.order.clone_from(&self.active);
        for at in 0..self.order.len() {
            let number = self.order[at];
            let domain = &self.domains[number];
            let caps = domain.cap_percent.into_iter().chain(domain.cap_now_percent);
            let (active, cap_percent) = (i64::from(domain.active), caps.min());
            let weight = i64::from(domain.weight) * active;
            weight_left -= weight;
            let mut peak = active * CREDITS_PER_SLICE;
            if owed > 0 {
                peak += ceil_div(owed * weight, weight_total);
            }
            let cap = cap_percent.map(|percent| ceil_div(i64::from(percent) * CREDITS_PER_SLICE, 100));
            peak = peak.min(cap.unwrap_or(peak));
            let mut fair = ceil_div(total * weight, weight_total);
            if fair < peak {
                others_took_less = true;
            } else {
                if weight_left != 0 {
                    total += ceil_div((fair - peak) * weight_total, weight_left);
                }
                if others_took_less {
                    // A domain that can take less than its share moves to the front, so that others get the rest next time.
                    self.active.retain(|other| *other != number);
                    self.active.insert(0, number);
                }
                fair = peak;
            }
            let cap_each = cap.map(|cap| ceil_div(cap, active));
            self.hand_out(number, ceil_div(fair, active), cap_each);
        }
    }

    /// Adds these credits to each active vCPU of a domain, and sets the vCPU's priority accordingly.
    fn hand_out(&mut self, domain: usize, credits: i64, cap: Option<i64>) {
        for at in 0..self.domains[domain].vcpus.len() {
            let task = self.domains[domain].vcpus[at];
            let vcpu = &mut self.vcpus[task];
            if !vcpu.active {
                continue;
            }
            vcpu.credit += credits;
            if vcpu.credit < 0 {
                vcpu.priority = Priority::Over;
                if cap.is_some_and(|cap| vcpu.credit < -cap) && !vcpu.parked {
                    vcpu.parked = true;
                    self.to_park.push(task);
                }
                vcpu.credit = vcpu.credit.max(-CREDITS_PER_SLICE);
            } else {
                vcpu.priority = Priority::Under;
                if vcpu.parked {
                    self.to_unpark.push(task);
                }
                if vcpu.credit > CREDITS_PER_SLICE {
                    vcpu.credit /= 2;
                    self.balance += vcpu.credit;
                    self.deactivate(task);
                    continue;
                }
            }
            self.balance += vcpu.credit;
        }
    }

    pub(super) fn activate(&mut self, task: TaskIx) {
        let vcpu = &mut self.vcpus[task];
        vcpu.active = true;
        let domain = &mut self.domains[vcpu.domain];
        domain.active += 1;
        self.weight += i64::from(domain.weight);
        if domain.active == 1 {
            self.active.insert(0, vcpu.domain);
        }
    }

    fn deactivate(&mut self, task: TaskIx) {
        let vcpu = &mut self.vcpus[task];
        vcpu.active = false;
        let number = vcpu.domain;
        let domain = &mut self.domains[number];
        domain.active -= 1;
        self.weight -= i64::from(domain.weight);
        if domain.active == 0 {
            self.active.retain(|other| *other != number);
        }
    }

    pub(super) fn burn(&mut self, task: TaskIx, ns: u64) {
        let vcpu = &mut self.vcpus[task];
        let burnt = ns * CREDITS_PER_MS + vcpu.residual;
        vcpu.credit -= (burnt / 1_000_000).cast_signed();
        vcpu.residual = burnt % 1_000_000;
    }
}

fn ceil_div(part: i64, whole: i64) -> i64 {
    (part + whole - 1) / whole
}
