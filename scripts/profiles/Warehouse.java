import java.util.ArrayDeque;
import java.util.HashMap;
import java.util.Map;
import java.util.TreeMap;

/**
 * A warehouse that takes orders, in the manner of SPECjbb 2005 (own code from its public description): objects that live
 * shortly, some that live long, tables of items and customers in trees and hash maps. To be profiled; the argument is the number
 * of orders.
 */
public final class Warehouse {
    private static final int ITEMS = 20_000;
    private static final int CUSTOMERS = 30_000;
    private static final int KEPT = 40_000;

    private record Item(int number, String name, long price) {}

    private record Line(Item item, int amount, long sum) {}

    private record Order(int number, int customer, Line[] lines, long total, String text) {}

    private long state = 88172645463325252L;

    private int draw(int below) {
        state ^= state << 13;
        state ^= state >>> 7;
        state ^= state << 17;
        return (int) Math.floorMod(state, (long) below);
    }

    private final Map<Integer, Item> items = new TreeMap<>();
    private final Map<Integer, Long> stock = new HashMap<>();
    private final Map<Integer, ArrayDeque<Order>> history = new HashMap<>();
    private final ArrayDeque<Order> open = new ArrayDeque<>();
    private long earned;

    private void order(int number) {
        int customer = draw(CUSTOMERS);
        Line[] lines = new Line[5 + draw(10)];
        long total = 0;
        StringBuilder text = new StringBuilder("order ").append(number).append(':');
        for (int at = 0; at < lines.length; at++) {
            Item item = items.get(draw(ITEMS));
            int amount = 1 + draw(9);
            lines[at] = new Line(item, amount, amount * item.price());
            stock.merge(item.number(), (long) -amount, Long::sum);
            total += lines[at].sum();
            text.append(' ').append(item.name()).append('x').append(amount);
        }
        Order order = new Order(number, customer, lines, total, text.toString());
        open.addLast(order);
        history.computeIfAbsent(customer, of -> new ArrayDeque<>()).addLast(order);
        if (open.size() > KEPT) {
            Order done = open.removeFirst();
            earned += done.total();
            history.get(done.customer()).pollFirst();
        }
    }

    public static void main(String[] arguments) {
        Warehouse warehouse = new Warehouse();
        for (int number = 0; number < ITEMS; number++) {
            warehouse.items.put(number, new Item(number, "item" + number * 31, 100 + number % 977));
        }
        int orders = Integer.parseInt(arguments[0]);
        for (int number = 0; number < orders; number++) {
            warehouse.order(number);
        }
        System.out.println("earned " + warehouse.earned);
    }
}
